"""How each tracker's library starts, continues and ends its run, and what it gets of a run of Forgather.

Each class is mixed in before the callback of transformers (of the library itself for Aim) by `guarded`. Without an
account or a server, W&B and Comet record the run in its folder.
"""

from __future__ import annotations

import netrc
import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forgather.ml.callbacks.output_target import run_folder
from forgather.ml.callbacks.run_record import RunRecord
from forgather.ml.callbacks.tracker import TrackerCallback
from forgather.ml.log import get_logger
from forgather.ml.tracking import Logged

_log = get_logger(__name__)

_LONGEST_WAIT = 5.0  # seconds


class WandbTracker(TrackerCallback):
    """Weights & Biases. Without an API key, the run is recorded offline in the run's folder."""

    tracker = "wandb"
    _wandb: Any
    _is_own = False
    _last_known = -1

    def open(self, args: Any, state: Any) -> None:
        """Starts or continues the run, unless the user's code has started one."""
        wandb = self._wandb
        self._is_own = wandb.run is None
        if not self._is_own:
            return
        folder = os.environ.get("WANDB_DIR") or str(run_folder(args))
        Path(folder).mkdir(parents=True, exist_ok=True)
        is_offline = not {"WANDB_MODE", "WANDB_DISABLED"} & set(os.environ) and not self._has_key()
        wandb.init(
            project=os.environ.get("WANDB_PROJECT") or args.project,
            name=os.environ.get("WANDB_NAME") or args.run_name,
            id=self.tracked["id"] if self.tracked else None,
            # Not "must": an offline run that was never uploaded is unknown to the server.
            resume="allow",
            dir=folder,
            mode="offline" if is_offline else None,
            # None of these is redacted: the console, the command line, the diff of the repository, the script.
            settings=wandb.Settings(
                console="off", disable_git=True, x_disable_meta=True, save_code=False, **_often_written(wandb)
            ),
        )
        self._last_known = int(wandb.run.summary.get("train/global_step", -1))
        if is_offline:
            recorded = Path(wandb.run.dir).parent
            _log.warning("wandb      no API key, so the run is recorded offline: `wandb sync %s` uploads it", recorded)

    def _has_key(self) -> bool:
        if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
            return True
        settings = self._wandb.setup().settings
        if settings.api_key:
            return True
        file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
        try:
            return netrc.netrc(file).authenticators(urlsplit(settings.base_url).hostname or "") is not None
        except (OSError, netrc.NetrcParseError):
            return False

    def run_id(self) -> str | None:
        """Returns the id of the run."""
        return self._wandb.run.id if self._wandb.run is not None else None

    def send_record(self, record: RunRecord) -> None:
        """Adds the record to the run's config, and its texts as files."""
        self._wandb.config.update({"forgather": dict(record.facts)}, allow_val_change=True)
        folder = Path(self._wandb.run.dir, "forgather")
        for name, text in record.texts.items():
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            # Files in the folder of the run are uploaded, if the library knows them.
            self._wandb.save(str(folder / name), base_path=str(folder.parent), policy="now")

    def last_step(self, name: str) -> int:
        """Returns the last step that the server had when the run was continued; -1 if the run is recorded offline."""
        return self._last_known

    def send(self, logged: Logged) -> None:
        """Sends an image, a table, or a text as a table of one row."""
        wandb = self._wandb
        if logged.kind == "image":
            shown = wandb.Image(str(logged.file))
        else:
            columns, rows = (["text"], [[logged.content]]) if logged.kind == "text" else logged.content
            shown = wandb.Table(columns=columns, data=rows)
        wandb.log({logged.name: shown, "train/global_step": logged.step})

    def end(self, error: BaseException | None) -> None:
        """Ends the run, with the exit status 1 after an error."""
        if self._is_own and self._wandb.run is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)
            self._initialized = False


def _often_written(wandb: Any) -> dict[str, float]:
    # A killed run loses what is not in its file, even what its checkpoint contains; the default is 15 seconds.
    name = "x_transaction_log_flush_interval"
    return {name: 1.0} if name in wandb.Settings.model_fields else {}


class MlflowTracker(TrackerCallback):
    """MLflow, with the tracking server or the local store that the environment names."""

    tracker = "mlflow"
    _ml_flow: Any
    _auto_end_run: bool
    _MAX_PARAM_VAL_LENGTH: int
    _MAX_PARAMS_TAGS_PER_BATCH: int

    def open(self, args: Any, state: Any) -> None:
        """Continues the run of a checkpoint; a new run is started by `send_settings`."""
        if self.tracked is not None and self._ml_flow.active_run() is None:
            self._ml_flow.start_run(run_id=self.tracked["id"])
            self._initialized = self._auto_end_run = self._async_log = True

    def send_settings(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Sends the settings of a new run. Those of a run that is continued cannot be changed."""
        if not self._initialized:
            shown = model.config.to_dict() if model is not None and model.config is not None else {}
            super().send_settings(_ShortArguments(args, self._MAX_PARAM_VAL_LENGTH), state, None, **kwargs)
            self._send_params({f"model.{name}": value for name, value in shown.items()})

    def _send_params(self, settings: Mapping[str, Any]) -> None:
        short = list(shortened(settings, self._MAX_PARAM_VAL_LENGTH).items())
        for begin in range(0, len(short), self._MAX_PARAMS_TAGS_PER_BATCH):
            self._ml_flow.log_params(dict(short[begin : begin + self._MAX_PARAMS_TAGS_PER_BATCH]))

    def run_id(self) -> str | None:
        """Returns the id of the run."""
        active = self._ml_flow.active_run()
        return active.info.run_id if active is not None else None

    def send_record(self, record: RunRecord) -> None:
        """Adds the record to the parameters of a new run, and its texts as artifacts."""
        if self._resumes:
            return
        self._send_params({f"forgather.{name}": value for name, value in record.facts.items()})
        for name, text in record.texts.items():
            self._ml_flow.log_text(text, f"forgather/{name}")

    def last_step(self, name: str) -> int:
        """Returns the last step of the metric in the store."""
        history = self._ml_flow.MlflowClient().get_metric_history(self.run_id(), name)
        return max((metric.step for metric in history), default=-1)

    def flush(self) -> None:
        """Waits for the metrics that were sent."""
        self._ml_flow.flush_async_logging()

    def send(self, logged: Logged) -> None:
        """Adds the file of a text, an image or a table as an artifact."""
        self._ml_flow.log_artifact(str(logged.file), "logged")

    def end(self, error: BaseException | None) -> None:
        """Ends the run as finished, failed or killed."""
        if self._auto_end_run and self._ml_flow.active_run() is not None:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            self._ml_flow.end_run("FINISHED" if error is None else status)
        self._initialized = False


class TrackioTracker(TrackerCallback):
    """Trackio, in the local store or the Space that the environment names. A run is known by its name."""

    tracker = "trackio"
    _trackio: Any

    def send_settings(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Starts the run and sends the settings."""
        if self.tracked is not None:
            args.run_name = self.tracked["id"]
        super().send_settings(args, state, model, **kwargs)

    def run_id(self) -> str | None:
        """Returns the name of the run."""
        run = self._trackio.context_vars.current_run.get()
        return run.name if run is not None else None

    def send_record(self, record: RunRecord) -> None:
        """Adds the record and its texts to the run's config."""
        self._trackio.config.update({"forgather": {**record.facts, **record.texts}}, allow_val_change=True)

    def flush(self) -> None:
        """Waits for the metrics that were sent: a thread of the library writes them twice a second."""
        run, end = self._trackio.context_vars.current_run.get(), time.monotonic() + _LONGEST_WAIT
        while getattr(run, "_queued_logs", None) and time.monotonic() < end:
            time.sleep(0.02)

    def last_step(self, name: str) -> int:
        """Returns the last step of the metric in the local store."""
        run = self._trackio.context_vars.current_run.get()
        logged = self._trackio.sqlite_storage.SQLiteStorage.get_logs(run.project, run.name)
        (shown,) = import_module("transformers.integrations.integration_utils").rewrite_logs({name: 0})
        return max((line["train/global_step"] for line in logged if shown in line), default=-1)

    def send(self, logged: Logged) -> None:
        """Sends an image, a table or a text."""
        trackio = self._trackio
        if logged.kind == "image":
            shown = trackio.Image(str(logged.file))
        elif logged.kind == "text":
            shown = trackio.Markdown(logged.content)
        else:
            shown = trackio.Table(columns=logged.content[0], data=logged.content[1])
        trackio.log({logged.name: shown, "train/global_step": logged.step})


class AimTracker(TrackerCallback):
    """Aim, in the repository of the working folder or the one that the environment names."""

    tracker = "aim"
    # It would start a run before it is known whether one is continued.
    ignored = ("on_init_end",)
    _run: Any
    _run_hash: str | None

    def __init__(self) -> None:
        # Neither the console nor the command line and the environment are redacted.
        super().__init__(capture_terminal_logs=False, log_system_params=False)  # type: ignore[call-arg]

    def open(self, args: Any, state: Any) -> None:
        """Chooses the run: that of the checkpoint, or a new one."""
        self._run_hash = self.tracked["id"] if self.tracked else None
        self._experiment_name = args.project

    def send_settings(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Starts the run and sends the settings."""
        super().send_settings(args, state, model if model is not None and model.config is not None else None)
        self._run.name = args.run_name

    def run_id(self) -> str | None:
        """Returns the hash of the run."""
        return self._run_hash

    def send_record(self, record: RunRecord) -> None:
        """Adds the record and its texts to the parameters of the run."""
        self._run.set("forgather", {**record.facts, **record.texts}, strict=False)

    def send(self, logged: Logged) -> None:
        """Tracks an image or a text; a table is a text."""
        aim = import_module("aim")
        if logged.kind == "image":
            shown = aim.Image(str(logged.file))
        else:
            shown = aim.Text(logged.content if logged.kind == "text" else Path(str(logged.file)).read_text())
        self._run.track(shown, name=logged.name, step=logged.step)

    def end(self, error: BaseException | None) -> None:
        """Nothing: the callback of Aim closes the run at the end of the training."""


class CometTracker(TrackerCallback):
    """Comet. Without an API key, the experiment is recorded offline in the run's folder."""

    tracker = "comet_ml"
    _experiment: Any

    def send_settings(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Starts or continues the experiment, and sends the settings."""
        comet = import_module("comet_ml")
        folder = Path(os.environ.get("COMET_OFFLINE_DIRECTORY") or run_folder(args))
        folder.mkdir(parents=True, exist_ok=True)
        is_offline = "COMET_START_ONLINE" not in os.environ and not comet.get_config("comet.api_key")
        config = comet.ExperimentConfig(
            name=args.run_name,
            offline_directory=str(folder),
            display_summary_level=0,
            # None of these is redacted.
            log_code=False, log_git_metadata=False, log_git_patch=False, parse_args=False, log_env_details=False,
            auto_output_logging=False, auto_metric_logging=False, auto_param_logging=False,
        )  # fmt: skip
        self._experiment = comet.start(
            online=False if is_offline else None,
            experiment_key=self.tracked["id"] if self.tracked else None,
            experiment_config=config,
        )
        self._initialized = True
        settings = args.to_dict()
        if model is not None and model.config is not None:
            settings["model"] = model.config.to_dict()
        self._experiment.log_parameters(settings, nested_support=True)
        if is_offline:
            _log.warning("comet_ml   no API key, so the experiment is recorded offline: `comet upload` sends it")

    def run_id(self) -> str | None:
        """Returns the key of the experiment."""
        key: str = self._experiment.get_key()
        return key

    def send_record(self, record: RunRecord) -> None:
        """Adds the record to the parameters, and its texts as assets."""
        self._experiment.log_parameters({"forgather": dict(record.facts)}, nested_support=True)
        for name, text in record.texts.items():
            self._experiment.log_asset_data(text, name=f"forgather/{name}")

    def send(self, logged: Logged) -> None:
        """Sends an image, a text or a table."""
        if logged.kind == "image":
            self._experiment.log_image(str(logged.file), name=logged.name, step=logged.step)
        elif logged.kind == "text":
            self._experiment.log_text(logged.content, step=logged.step, metadata={"name": logged.name})
        else:
            self._experiment.log_table(str(logged.file))

    def flush(self) -> None:
        """Waits for the metrics that were sent."""
        self._experiment.flush()

    def end(self, error: BaseException | None) -> None:
        """Ends the experiment."""
        self._experiment.end()
        self._initialized = False


class _ShortArguments:
    """The training arguments as one level of settings, each of a limited length."""

    def __init__(self, args: Any, limit: int) -> None:
        self._args, self._limit = args, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)

    def to_dict(self) -> dict[str, str]:
        return shortened(self._args.to_dict(), self._limit)


def shortened(settings: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Returns nested settings as one level of texts, under names that MLflow accepts.

    Args:
        settings: the settings.
        limit: the largest number of characters of a value.

    Example:
        >>> shortened({"optimizer": {"lr": 0.1, "betas[0]": 0.9}}, 2)
        {'optimizer.lr': '0.', 'optimizer.betas_0_': '0.'}
    """
    short: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            short |= shortened({f"{name}.{inner}": item for inner, item in value.items()}, limit)
        else:
            short[re.sub(r"[^\w\-. :/]", "_", name)] = str(value)[:limit]
    return short


KINDS: dict[str, type[TrackerCallback]] = {
    kind.tracker: kind for kind in (WandbTracker, MlflowTracker, TrackioTracker, AimTracker, CometTracker)
}
"""The classes, by the name of the tracker."""

"""R8 on real refusals: a device that is full, files that may not grow, and disks of every size that is too small."""

import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgather.errors import ForgatherError
from forgather.ml.checkpoint import verify
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.checkpoint.storage import LocalFile, LocalStorage
from tests.reliability import job
from tests.reliability.forks import in_child

KIND = "synchronous"
TOLD = ("FG609", "FG817", "FG630")
PAGE = 4096


@pytest.fixture
def clean(tmp_path):
    job.trainer(tmp_path / "clean", KIND).train()
    return tmp_path / "clean"


def tried(folder, storage=None, largest=None):
    """Goes on with a run; returns the code of the error that it ends with, or ""."""
    if largest is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        job.trainer(folder, KIND, storage).train(resume_from_checkpoint="auto")
    except ForgatherError as error:
        return error.code
    return ""


def refused(folder, storage=None, largest=None):
    """Tries, and looks at what is left; returns whether the run was refused."""
    before = [step for step, _ in list_checkpoints(folder)]
    ended = in_child(tried, folder, storage, largest)
    assert "" == ended.error, ended.error
    assert ended.value in ("", *TOLD), ended.value
    steps = [step for step, checkpoint in list_checkpoints(folder) if verify(checkpoint)]
    assert set(before) <= set(steps)
    return bool(ended.value)


class FullAt(LocalStorage):
    """The file system, but the file number `number` lies on a device that is full."""

    def __init__(self, number):
        self.left = number

    def create(self, file):
        self.left -= 1
        return LocalFile(Path("/dev/full")) if self.left == 0 else super().create(file)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("number", [1, 8, 14, 25])
def test_a_full_device(number, clean, tmp_path):
    folder = tmp_path / "out"
    assert refused(folder, storage=FullAt(number))
    assert [] == job.differences(job.digest(clean), job.finish(folder, KIND))


@pytest.mark.parametrize("largest", [0, 100, PAGE, 16_000])
def test_files_that_may_not_grow(largest, clean, tmp_path):
    folder = tmp_path / "out"
    assert refused(folder, largest=largest)
    assert [] == job.differences(job.digest(clean), job.finish(folder, KIND))


@contextmanager
def small_disk(place, size):
    """Gives a file system of so many bytes, and how to make it larger."""
    place.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="the system has no mount")
def test_disks_of_every_size_that_is_too_small(full, figure, clean, tmp_path):
    """The disk grows page by page until the run fits; it goes on whenever it can."""
    needed = sum(-(-file.stat().st_size // PAGE) * PAGE for file in clean.rglob("*") if file.is_file())
    sizes = range(PAGE, needed + 4 * PAGE, PAGE)
    sizes = sizes if full else sizes[:: len(sizes) // 3]
    failed = 0
    for begun in sizes:
        with small_disk(tmp_path / "disk", begun) as grow:
            folder = tmp_path / "disk" / "out"
            failed += refused(folder)
            grow(4 * needed)
            # In a process of its own: one that has files of the disk in its memory keeps it.
            ended = in_child(job.finish, folder, KIND)
            assert "" == ended.error, ended.error
            assert [] == job.differences(job.digest(clean), ended.value), begun
    assert failed > len(sizes) // 2
    with small_disk(tmp_path / "disk", PAGE) as grow:  # and one run that fails again and again, and gets further
        folder, attempts = tmp_path / "disk" / "out", 0
        for size in range(PAGE, 4 * needed, PAGE if full else 8 * PAGE):
            grow(size)
            if not refused(folder):
                break
            attempts += 1
        assert attempts > 3
        assert [] == job.differences(job.digest(clean), job.digest(folder))
    figure(
        "R8",
        f"{failed} of {failed} disks that were too small, and {attempts} failures of one run: reported, the same bits",
    )

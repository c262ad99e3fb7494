"""Names of the Hub without a network: one quick error, and the cache where it has them."""

import socket

import datasets.config
import pytest
from huggingface_hub import constants

from forgather.errors import ForgatherError
from forgather.ml.data import hub_dataset, load_tokenizer
from forgather.ml.hub import hub_access
from forgather.ml.models import from_pretrained


@pytest.fixture
def asked(monkeypatch):
    """Closes the network; gives the list of addresses that were tried."""
    tried = []

    def refuse(address, *args, **kwargs):
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tried


@pytest.mark.parametrize(
    ("ask", "code", "argument"),
    [
        (lambda: from_pretrained("nobody/nothing"), "FG840", "pretrained_model_name_or_path"),
        (lambda: load_tokenizer("nobody/nothing"), "FG844", "pretrained_model_name_or_path"),
        (lambda: hub_dataset("nobody/nothing"), "FG843", "name"),
    ],
)
def test_without_a_network_a_name_is_asked_for_once(asked, ask, code, argument):
    with pytest.raises(ForgatherError) as caught:
        ask()
    assert (code, argument) == (caught.value.code, caught.value.argument)
    assert [("huggingface.co", 443)] == asked


@pytest.mark.parametrize(
    ("ask", "code"), [(from_pretrained, "FG840"), (load_tokenizer, "FG844"), (hub_dataset, "FG843")]
)
@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "/nowhere/at", "not/here/at-all"])
def test_a_path_is_never_asked_of_the_hub(asked, ask, code, name):
    with pytest.raises(ForgatherError, match=rf"\[{code}\] .*could not be loaded: there is no such folder") as caught:
        ask(name)
    assert "the working folder is" in caught.value.hint
    assert [] == asked


def test_the_libraries_are_offline_inside_only_and_each_gets_its_own_setting_back(asked, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ZeroDivisionError), hub_access():
        assert (True, True) == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
        raise ZeroDivisionError
    assert (False, True) == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_behind_a_proxy_nothing_is_tried(asked, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    with hub_access():
        assert constants.HF_HUB_OFFLINE is False
    assert [] == asked

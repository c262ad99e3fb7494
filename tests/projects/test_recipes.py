"""The recipes of another tool: their files are unchanged, and every key is read or answered by name."""

import hashlib
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "projects" / "recipes" / "configs"
# Of the files in the document that they come from.
DIGESTS = {
    "fsdp_qlora_llama7b.yaml": "5eadd7470e78e08609de4e65ad450ea540f0438cdf9fa1772b1ac06fc0e6e023",
    "deepspeed_zero2_sd_lora.yaml": "4b6d915972fbcb7e96d0f5abdc19b21408c7643c86b7b3146753371d4275463c",
    "deepspeed_zero2_config.json": "11fcf1cd2e621e78f2984084481759b19e3507fd19257a643954c8d16940a6a3",
}


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_recipe_is_unchanged(name):
    assert DIGESTS[name] == hashlib.sha256((RECIPES / name).read_bytes()).hexdigest()

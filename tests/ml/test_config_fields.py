"""A field that a configuration's class does not have is reported: transformers stores any keyword, unused."""

import logging

import transformers

from forgather.ml.models import from_config


def small(**fields):
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 16,
        "num_hidden_layers": 1,
    }
    return transformers.LlamaConfig(**sizes, **fields)


def warnings_of(config, caplog):
    with caplog.at_level(logging.WARNING):
        from_config(config)
    return [record.getMessage() for record in caplog.records]


def test_a_misspelt_field_is_named_with_the_nearest_one(caplog):
    found = warnings_of(small(num_hiden_layers=2), caplog)
    wanted = "LlamaConfig has no field 'num_hiden_layers', so it has no effect: did you mean 'num_hidden_layers'?"
    assert [wanted] == found


def test_known_fields_are_not_remarked_on(caplog):
    assert [] == warnings_of(
        small(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), caplog
    )

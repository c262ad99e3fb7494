"""Rows of four forms become messages; a row that is not a conversation is an error that names its file and line."""

import gzip
import json

import pytest
from datasets import Dataset

from forgather.ml.data import DataError, DataFileError, as_chats, chats, json_lines
from forgather.ml.data.chat_rows import Conversation
from forgather.ml.generation.prompt import PromptError, questions_of
from tests.ml.chat_cases import CONVERSATIONS, SUM_TOOL, dialogue, said


def lines(tmp_path, *rows, name="chats.jsonl"):
    file = tmp_path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def read(tmp_path, *rows, **options):
    return [Conversation.from_json(text) for text in chats(lines(tmp_path, *rows), **options)["conversation"]]


HELLO = dialogue("Hi", "Hello")
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
FORMS = {
    "messages": [
        ({"messages": HELLO}, HELLO, None),
        ({"messages": HELLO, "system": "S"}, [said("system", "S"), *HELLO], None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "id": 7}, HELLO[1]]}, HELLO, None),
    ],
    "sharegpt": [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, HELLO, None),
        (
            {"system": "S", "conversations": [{"from": "user", "value": "Hi"}, {"from": "model", "value": "Hello"}]},
            [said("system", "S"), *HELLO],
            None,
        ),
    ],
    "instruction": [
        ({"instruction": "Hi", "output": "Hello"}, HELLO, 1),
        ({"instruction": "Add", "input": "1 1", "output": "2"}, dialogue("Add\n\n1 1", "2"), 1),
        ({"instruction": "Add", "input": "", "output": "2", "system": ""}, dialogue("Add", "2"), 1),
        (
            {"instruction": "B?", "output": "b", "history": [["A?", "a"]], "system": "S"},
            dialogue("A?", "a", "B?", "b", system="S"),
            4,
        ),
    ],
    "prompt": [
        ({"prompt": "Hi", "completion": "Hello"}, HELLO, 1),
        ({"question": "Hi", "answer": "Hello", "id": 3}, HELLO, 1),
        (
            {"prompt": dialogue("A?", "a", "B?"), "completion": [said("assistant", "b")]},
            dialogue("A?", "a", "B?", "b"),
            3,
        ),
    ],
}
ROWS = [(form, *case) for form, cases in FORMS.items() for case in cases]


@pytest.mark.parametrize(("form", "row", "messages", "num_prompt"), ROWS)
def test_a_row_is_read_as_messages(form, row, messages, num_prompt, tmp_path):
    assert [Conversation(messages, None, num_prompt)] == read(tmp_path, row) == read(tmp_path, row, form=form)
    if not any(isinstance(value, list) for item in row.get("messages", []) for value in item.values()):
        found = as_chats(Dataset.from_list([row]))
        assert Conversation(messages, None, num_prompt) == Conversation.from_json(found[0]["conversation"])


def test_tools_and_calls_keep_their_fields_in_every_source(tmp_path):
    messages, tools = CONVERSATIONS["tools"]
    other = {**SUM_TOOL, "function": {"name": "now", "parameters": {"zone": 1}}}
    called = [{"function": {"name": "now", "arguments": {"zone": "utc"}}}]
    rows = [
        {"messages": messages, "tools": tools},
        {"messages": [HELLO[0], {"role": "assistant", "tool_calls": called}], "tools": json.dumps([other])},
    ]
    first, second = read(tmp_path, *rows)
    assert (messages, tools) == (first.messages, first.tools)
    assert ([other], {"zone": "utc"}) == (second.tools, second.messages[1]["tool_calls"][0]["function"]["arguments"])
    # Arrow gives both rows the arguments of both calls: those that a row does not have are None.
    rows[1]["tools"] = [other]
    found = [Conversation.from_json(text) for text in as_chats(Dataset.from_list(rows))["conversation"]]
    assert [first, second] == found


def test_arguments_that_are_stored_as_text_become_a_mapping(tmp_path):
    row = {"conversations": [{"from": "human", "value": "1?"}, {"from": "function_call", "value": '{"name": "add"}'}]}
    assert {"name": "add", "arguments": {}} == read(tmp_path, row)[0].messages[1]["tool_calls"][0]["function"]
    message = read(tmp_path, {"messages": [HELLO[0], CALLING]})[0].messages[1]
    assert {"a": 1} == message["tool_calls"][0]["function"]["arguments"]
    assert "content" not in message


def test_a_system_message_is_added_where_there_is_none(tmp_path):
    rows = [{"messages": HELLO}, {"messages": dialogue("Hi", "Hello", system="own")}]
    found = read(tmp_path, *rows, system="added")
    assert ["added", "own"] == [one.messages[0]["content"] for one in found]
    assert [2] == [one.num_prompt for one in read(tmp_path, {"prompt": "Hi", "completion": "Hello"}, system="added")]


def test_a_list_in_one_file_is_read_as_lines_are(tmp_path):
    rows = [{"messages": HELLO}, {"messages": dialogue("Bye", "Bye")}]
    one = tmp_path / "list.json"
    one.write_text("\ufeff" + json.dumps(rows, indent=2), encoding="utf-8")
    found = chats(one)
    assert chats(lines(tmp_path, *rows))["conversation"] == found["conversation"]
    assert [f"row 0 of {one}", f"row 1 of {one}"] == found["source"]


def test_equal_rows_have_an_equal_fingerprint_wherever_they_are(tmp_path):
    (tmp_path / "other").mkdir()
    first = chats(lines(tmp_path, {"messages": HELLO}))
    assert first._fingerprint == chats(lines(tmp_path / "other", {"messages": HELLO}))._fingerprint
    assert first._fingerprint != chats(lines(tmp_path, {"messages": HELLO}), system="S")._fingerprint


def turns(*roles):
    return {"messages": [said(role, "x") for role in roles]}


BAD = [
    ("FG890", {"messages": HELLO, "system": 5}, "'system' must be text, found a number"),
    ("FG891", {"messages": [said("system", "a"), *HELLO], "system": "b"}, "'system' and another system message"),
    ("FG890", {"messages": [said("user", "\ud800"), HELLO[1]]}, "half of a surrogate pair"),
    ("FG890", {"messages": [HELLO[0], {**HELLO[1], "reasoning_content": 5}]}, "reasoning_content of message 2 must be"),
    ("FG890", {"messages": [{"content": "Hi"}, HELLO[1]]}, "message 1 has no role"),
    ("FG890", turns("user", "asistant"), "message 2 has the unknown role 'asistant'"),
    ("FG890", turns("user", 3), "message 2 has the unknown role 3"),
    ("FG890", {"messages": "Hi"}, "'messages' must be a list of messages, found text"),
    ("FG890", {"messages": None}, "'messages' must be a list of messages, found null"),
    ("FG890", {"messages": []}, "'messages' is empty"),
    ("FG890", {"messages": ["Hi"]}, "message 1 must be a mapping with 'role' and 'content', found text"),
    ("FG890", {"messages": [said("user", None), HELLO[1]]}, "message 1 (user) has no content"),
    (
        "FG890",
        {"messages": [said("user", 5), HELLO[1]]},
        "the content of message 1 (user) must be text or null, found a number",
    ),
    ("FG890", {"messages": [said("user", [{"type": "image"}])]}, "must be text or null, found a list"),
    ("FG890", ["messages"], "a row must be a JSON object, found a list"),
    ("FG890", {"conversations": [{"from": "robot", "value": "x"}]}, "message 1 is from the unknown speaker 'robot'"),
    (
        "FG890",
        {"conversations": [{"from": "function_call", "value": "x"}]},
        "the function call in message 1 is not valid JSON",
    ),
    (
        "FG890",
        {"messages": [HELLO[0], {**CALLING, "tool_calls": [{"id": 1}]}]},
        "a tool call of message 2 has no function name",
    ),
    ("FG890", {"messages": [HELLO[0], {**CALLING, "tool_calls": 1}]}, "tool_calls of message 2 must be a list"),
    ("FG890", {"messages": [{**CALLING, "role": "user"}]}, "message 1 (user) calls tools"),
    ("FG890", {"messages": HELLO, "tools": {}}, "'tools' must be a list of mappings, found a mapping"),
    ("FG890", {"instruction": 1, "output": "x"}, "'instruction' must be text, found a number"),
    ("FG890", {"prompt": "x", "completion": None}, "'completion' must be text, found null"),
    ("FG890", {"instruction": "x", "output": "x", "input": ["y"]}, "input and context must be texts"),
    ("FG890", {"instruction": "x", "output": "x", "history": [["y"]]}, "'history' must be a list of pairs"),
    ("FG891", turns("user", "user"), "message 2 has the role 'user' after 'user'; expected 'assistant'"),
    (
        "FG891",
        turns("assistant", "user"),
        "message 1 has the role 'assistant' at the start; expected 'system' or 'user'",
    ),
    ("FG891", turns("user", "system"), "message 2 has the role 'system' after 'user'"),
    ("FG891", turns("user", "assistant", "tool"), "message 3 has the role 'tool' after 'assistant'; expected 'user'"),
    ("FG891", {"messages": [HELLO[0], CALLING, HELLO[0]]}, "after 'assistant', which called a tool; expected 'tool'"),
    (
        "FG891",
        {"messages": [HELLO[0], said("assistant", " \n")]},
        "message 2 (assistant) is empty: there is nothing to learn",
    ),
    ("FG891", {"messages": [HELLO[0], said("assistant", None)]}, "message 2 (assistant) is empty"),
    ("FG891", {"prompt": "x", "completion": ""}, "message 1 (assistant) is empty"),
    ("FG892", {"text": "Hi", "id": 1}, "the row is in none of the known forms; it has 'text', 'id'"),
]


@pytest.mark.parametrize(("code", "row", "message"), BAD)
def test_a_bad_row_is_named_by_its_line(code, row, message, tmp_path):
    file = lines(tmp_path, {"messages": HELLO}, "", row) if "messages" in row else lines(tmp_path, "", "", row)
    with pytest.raises(DataError) as error:
        chats(file)
    assert (code, "paths") == (error.value.code, error.value.argument)
    assert error.value.message.startswith(f"{file}:3: ")
    assert message in error.value.message


def test_mixed_forms_in_one_file_are_refused_and_in_two_files_read(tmp_path):
    mixed = lines(tmp_path, {"messages": HELLO}, {"instruction": "Hi", "output": "Hello"})
    with pytest.raises(
        DataError, match=r"chats\.jsonl:2: the row is in the form 'instruction', and .* are in 'messages'"
    ):
        chats(mixed)
    second = lines(tmp_path, {"instruction": "Hi", "output": "Hello"}, name="second.jsonl")
    first = lines(tmp_path, {"messages": HELLO})
    assert 2 == len(chats([first, second]))


def test_all_bad_rows_are_reported_or_left_out(tmp_path, caplog):
    file = lines(tmp_path, turns("user"), turns("assistant"), {"messages": HELLO}, turns("robot"), {"messages": 1})
    with pytest.raises(DataError, match="2 more rows with an error") as error:
        chats(file)
    assert ["FG890", "FG890"] == [other.code for other in error.value.others]
    found = chats(file, bad_rows="drop")
    assert [f"{file}:1", f"{file}:3"] == found["source"]
    assert f"3 rows left out, the first: {file}:2: message 1" in caplog.text
    with pytest.raises(DataError, match="gives no conversation") as error:
        chats(lines(tmp_path, turns("robot")), bad_rows="drop")
    assert "FG832" == error.value.code


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"messages": [', "jsonl:1 cannot be read: it is not JSON"),
        ("[1, 2", "Expecting"),
        ('{\n "messages": []\n}', "jsonl:1 cannot be read: it is not JSON"),
        ("\xff", "invalid start byte"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "jsonl:1 cannot be read: an object has the key 'b' twice"),
        ('[{"a": 1, "a": 1}]', "an object has the key 'a' twice"),
        ('{}\n{"a": ' + "9" * 5000 + "}", "jsonl:2 cannot be read: a number has more digits than can be read"),
        ("[" + "9" * 5000 + "]", "a number has more digits than can be read"),
    ],
)
def test_a_file_that_is_not_json_is_named(text, told, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFileError, match=r"chats\.jsonl(:\d)? cannot be read") as error:
        chats(file)
    assert told in error.value.message
    assert "FG834" == error.value.code


ROW = json.dumps({"messages": HELLO}).encode() + b"\n"


@pytest.mark.parametrize(
    "content, told",
    [
        (gzip.compress(ROW * 20), "chats.jsonl cannot be read: it is compressed by gzip, and has to be unpacked first"),
        (ROW.decode().encode("utf-16"), "chats.jsonl cannot be read: it is UTF-16 text, and has to be saved as UTF-8"),
        # Further from the beginning than a block of the reader.
        (
            ROW * 500 + b'"\xff"\n',
            "chats.jsonl:501 cannot be read: byte 2 of the line is not UTF-8 (invalid start byte)",
        ),
    ],
)
def test_a_file_that_is_not_utf8_is_told_by_what_it_is_or_by_its_line(content, told, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataFileError) as error:
        chats(file)
    assert error.value.message.endswith(told)
    assert "FG834" == error.value.code


@pytest.mark.parametrize("column", ["text", "messages"])
def test_the_reader_of_texts_names_the_reader_of_conversations(column, tmp_path):
    with pytest.raises(DataError, match="conversations are read by forgather.ml.data:chats") as error:
        json_lines(lines(tmp_path, {"messages": HELLO}), text_column=column)
    assert {"text": "FG831", "messages": "FG833"}[column] == error.value.code


def test_a_value_that_is_not_a_choice_is_refused(tmp_path):
    file = lines(tmp_path, {"messages": HELLO})
    with pytest.raises(DataError, match="form is 'sharegtp'.*did you mean 'sharegpt'") as error:
        chats(file, form="sharegtp")
    assert ("FG892", "form") == (error.value.code, error.value.argument)
    with pytest.raises(DataError, match="bad_rows is 'skip'"):
        chats(file, bad_rows="skip")
    with pytest.raises(DataError, match="form 'instruction' needs a prompt and a completion"):
        chats(lines(tmp_path, {"messages": HELLO}), form="instruction")


def test_a_conversation_with_a_column_that_says_where_it_is_from_is_asked():
    question = {"role": "user", "content": "1?"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": "one"}], "source": "sums"},
        {"question": "1?", "answer": "one", "source": "sums"},
        {"source": "1?", "target": "one", "id": 7},
    ]

    *conversations, text = questions_of(map(json.dumps, rows), "rows.jsonl", is_json=True)

    assert [((question,), "one")] * 2 == [(one.messages, one.expected) for one in conversations]
    assert ("1?", (), "one") == (text.text, text.messages, text.expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"article": "Long.", "highlights": "Short."}, ("Long.", "Short.")),
        ({"source": "Long."}, ("Long.", None)),
        ({"translation.de": "Kurz.", "source": "Long.", "target": 3}, ("Long.", None)),
    ],
)
def test_pairs_are_asked_in_the_columns_that_training_finds(row, expected):
    (question,) = questions_of([json.dumps(row)], "rows.jsonl", is_json=True)

    assert (question.text, question.expected) == expected


@pytest.mark.parametrize("row", [{"text": "Which?"}, {"translation": {"de": "Kurz.", "en": "Short."}}, {"source": 4}])
def test_rows_in_which_nobody_can_see_the_question_are_refused(row):
    with pytest.raises(PromptError, match="known forms"):
        questions_of([json.dumps(row)], "rows.jsonl", is_json=True)

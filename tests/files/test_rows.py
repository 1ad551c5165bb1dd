"""Files of rows: the one that is named is read, and what cannot be read is told by its place."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_twell.recipe.packing import documents_of, token_ids
from tests.paths import MODEL

TALK = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]


def texts(source) -> list:
    return [document.content for document in documents_of(source)]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        plain = path.with_name("plain.parquet")  # as to_parquet takes its path apart, too
        pytest.importorskip("datasets").Dataset.from_list([{"text": text}]).to_parquet(plain)
        plain.rename(path)
    else:
        path.write_text(json.dumps({"text": text}) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("named", "others"),
    [
        ("books[12]", ["books1", "books2"]),
        ("runs[ab]/x", ["runsa/x", "runsb/x"]),
        ("books*", ["books1"]),
        ("book?", ["books"]),
        ("**/x", ["a/x"]),
        ("{a,b}", ["a", "b"]),
        ("zip::x", ["x"]),
        ("zip:/x", ["x"]),
        ("[", []),
        ("a%20b", ["a b"]),
    ],
)
def test_a_path_is_the_one_file_of_that_name(named, others, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in others:
        write(tmp_path / f"{other}.{kind}", "another")
    path = write(tmp_path / f"{named}.{kind}", "this one")
    assert texts(path) == texts([f"{named}.{kind}"]) == ["this one"]


def test_a_folder_that_datasets_would_take_for_a_pattern_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for folder in ("runsa", "runs[ab]", "a::b"):
        write(tmp_path / folder / "x.jsonl", folder)
    for source in ({"hub": "runs[ab]"}, {"hub": "a::b"}, {"hub": "json", "data_dir": str(tmp_path / "runs[ab]")}):
        with pytest.raises(ValueError, match="whose name is a pattern for datasets; rename it"):
            texts(source)
    assert texts({"hub": "json", "data_files": "runs?/x.jsonl"}) == ["runsa"], "its own patterns are patterns"
    with pytest.raises(ValueError, match=r"data_files: runs\[ab\]/x.jsonl is a pattern .*; name the file itself"):
        texts({"hub": "json", "data_files": "runs[ab]/x.jsonl"})


def test_what_a_data_set_has_no_file_for_is_said(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^none\*.jsonl cannot be read as rows \(no file is called so"):
        texts({"hub": "json", "data_files": "none*.jsonl"})
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text": "b')
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"torn.jsonl cannot be read as rows.* Missing a closing quotation mark"):
            texts({"hub": "json", "data_files": "torn.jsonl", "streaming": streaming})


def test_rows_of_every_form_are_read_as_they_are(tmp_path):
    rows = [{"text": "2020-01-01"}, {"text": "a\u2028b\u0085c", "n": 1}, {"messages": TALK, "text": "t"}, {"text": ""}]
    lines, listed = [json.dumps(row, ensure_ascii=False) for row in rows], json.dumps(rows, indent=1)
    contents = {
        "a.jsonl": "\n".join(lines),
        "b.jsonl": "\ufeff" + "\r\n \r\n".join(lines) + "\r\n",
        "c.json": listed,
        "d.jsonl": "\ufeff \n" + listed,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
        assert texts(str(tmp_path / name)) == [row["text"] for row in rows], name
    pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(tmp_path / "e.parquet")
    assert texts(str(tmp_path / "e.parquet")) == [row["text"] for row in rows]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"text": "a"}))
    assert texts(str(tmp_path / "talks.jsonl")) == [TALK, "a"], "a file may hold both"


def messages(*changes: dict) -> str:
    """A good row, and one whose last message is changed."""
    return "".join(json.dumps({"messages": [TALK[0], {**TALK[1], **change}]}) + "\n" for change in ({}, *changes))


GOOD = '{"text": "a"}\n'
FAULTS = {
    "null content": (messages({"content": None}), r"line 2: messages\[1\].content is null, and must be a text; leave"),
    "tool calls": (
        messages({"content": None, "tool_calls": CALL}),
        r'line 2: messages\[1\].content is null, and must be a text \(beside tool_calls "", if there is none\); leave',
    ),
    "parts": (
        messages({"content": [{"type": "text"}]}),
        r"line 2: messages\[1\].content is a list, and must be a text",
    ),
    "no role": ('{"messages": [{"content": "a"}]}', r"line 1: messages\[0\] has no role; leave such rows out"),
    "a text for a message": ('{"messages": ["a"]}', r"line 1: messages\[0\] is a text, and must be a message"),
    "no messages": ('{"messages": []}', "line 1: messages is an empty list, and must be a list of messages"),
    "JSON in a text": ('{"messages": "[]"}', "line 1: messages is a text, and must be a list of messages"),
    "null": (GOOD + '{"text": null}', "line 2: text is null, and must be a text; leave such rows out"),
    "a number": (GOOD + "\n" + '{"text": 3}', "line 3: text is a number, and must be a text; leave such rows out"),
    "far in": (GOOD * 999 + '{"text": {}}', "line 1000: text is an object, and must be a text"),
    "half a character": ('{"text": "ab\\ud83d"}', "line 1: text holds half of a surrogate pair at character 3"),
    "no such column": (
        GOOD + '{"page": "a"}',
        "line 2 has neither a column 'text' nor 'messages'; it has page; rename",
    ),
    "a list": (GOOD + '["a"]', "line 2 is a list, and must be an object"),
    "torn": (GOOD + '{"text": "b', r"line 2 is no JSON \(Unterminated .* character 10; the file ends here, cut off\);"),
    "no JSON": (GOOD + "{'text': 1}\n", r"line 2 is no JSON \(Expecting property name .*: character 2\); mend it"),
    "torn list": ('[{"text": "a"},\n{"text', r"is no JSON \(Unterminated string .*: line 2, character 2\); mend it"),
    "in a list": ('[{"text": "a"}, {"text": null}]', "row 2: text is null, and must be a text"),
    "nested": (GOOD + "[" * 100_000, "line 2 is no JSON that can be read"),
    "many digits": (GOOD + '{"n": ' + "9" * 5000 + "}", "line 2 is no JSON that can be read"),
    "UTF-16": ((GOOD + GOOD).encode("utf-16"), r"line 1 is not UTF-8 \(it begins as UTF-16 does\); save the file as"),
    "UTF-16 without a mark": (GOOD.encode("utf-16-le"), "line 1 holds NUL bytes, as UTF-16 does; save the file as"),
    "Latin-1": ((GOOD + '{"text": "é"}').encode("latin-1"), r"line 2 is not UTF-8 \(byte 11 of it is 0xe9\); save"),
    "empty": ("", "holds no rows; give a file that does"),
    "blank": ("\n \n", "holds no rows; give a file that does"),
    "no rows": ("[]", "holds no rows; give a file that does"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_told_by_its_place(fault, tmp_path):
    content, says = FAULTS[fault]
    path = tmp_path / "rows[1].jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    joint = ", " if says.startswith(("line", "row")) else " "
    with pytest.raises(ValueError, match=rf"/rows\[1\]\.jsonl{joint}{says}") as error:
        texts(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value).replace(str(path), "")) < 250


def test_rows_of_parquet_that_cannot_be_read_are_told_by_their_place(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"messages": TALK}, {"messages": [{**TALK[0], "content": None}]}]).to_parquet(path)
    with pytest.raises(ValueError, match=r"rows.parquet, row 2: messages\[0\].content is null, and must be a text"):
        texts(str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as Parquet \(ArrowInvalid: .*\); fetch"):
        texts(str(path))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as Parquet"):
        texts(str(path))
    datasets.Dataset.from_list([{"page": "a", "n": math.pi}]).to_parquet(path)
    with pytest.raises(ValueError, match="row 1 has neither a column 'text' nor 'messages'; it has page, n; rename"):
        texts(str(path))


def test_what_a_chat_template_does_not_take_is_told_by_its_place(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    path = tmp_path / "rows.jsonl"
    path.write_text(messages({"role": "bot"}))
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .* has no chat template to read messages by"):
        token_ids(tokenizer, str(path))
    tokenizer.chat_template = "{% if messages[1].role == 'bot' %}{{ raise_exception('no bots') }}{% endif %}x"
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: the chat template does not take .*: no bots$"):
        token_ids(tokenizer, str(path))
    path.write_text(messages({"content": "", "tool_calls": CALL}))
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: the chat template does not write tool_calls, which"):
        token_ids(tokenizer, str(path))
    tokenizer.chat_template += "{{ messages[-1].tool_calls[0].function.name if messages[-1].tool_calls is defined }}"
    assert tokenizer.decode(token_ids(tokenizer, str(path))) == "xxadd"

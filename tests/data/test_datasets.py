from __future__ import annotations

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

import verl.data
import verl.utils.data
from verl.config import get_default_config
from verl.data.datasets import DataProvider, PromptDataset, PromptText, RowDataset
from verl.errors import ConfigError, DataError

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "hello"}
ROWS = [{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(50)]


def write_parquet(path, rows, group=10):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_rows_by_index_are_the_same_from_every_form(jsonl, tmp_path):
    paths = [
        jsonl(ROWS),
        jsonl(ROWS, "rows.jsonl.gz"),
        write_parquet(tmp_path / "rows.parquet", ROWS),
    ]
    for path in paths:
        rows = RowDataset(path, "rl")
        assert isinstance(rows, TorchDataset) and len(rows) == 50 and rows.columns == ["prompt"]
        assert [rows[i] for i in (49, 0, 10, 9)] == [ROWS[i] for i in (49, 0, 10, 9)]
        assert rows[-1] == ROWS[-1] and list(rows) == ROWS
        assert rows.where(9) == f"{path}:10"
        with pytest.raises(IndexError):
            rows[50]
        assert list(pickle.loads(pickle.dumps(rows))) == ROWS
        short = RowDataset(path, "rl", max_rows=3)
        assert list(short) == ROWS[:3]


def test_parquet_rows_of_a_large_file(tmp_path):
    rows = [{"prompt": f"p{i}"} for i in range(9000)]
    dataset = RowDataset(write_parquet(tmp_path / "large.parquet", rows, group=1000), "rl")
    assert len(dataset) == 9000
    for index in (8999, 0, 4095, 4096, 8191, 8192):
        assert dataset[index] == rows[index]


def test_jsonl_index_skips_bom_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "é\u2028"}\r\n\r\n{"prompt": "b"}'.encode())
    rows = RowDataset(path, "rl")
    assert list(rows) == [{"prompt": "é\u2028"}, {"prompt": "b"}]
    assert rows.where(1) == f"{path}:3"


def test_fingerprint_follows_the_content(jsonl):
    a, same, other = jsonl(ROWS), jsonl(ROWS, "b.jsonl"), jsonl(ROWS[:-1], "c.jsonl")
    prints = [RowDataset(path, "rl").fingerprint() for path in (a, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert RowDataset(a, "rl", max_rows=5).fingerprint() != prints[0]


def test_b26_bad_rows_name_file_line_and_key(jsonl):
    path = jsonl([{"prompt": "x"}, {"prmpt": "x"}, {"prompt": None}, {"prompt": ""}])
    rows = RowDataset(path, "rl")
    assert rows[0] == {"prompt": "x"}
    for index, reason in [
        (1, f"{path}:2: prompt: column is missing; did you mean 'prmpt'?"),
        (2, f"{path}:3: prompt: is null"),
        (3, f"{path}:4: prompt: is empty"),
    ]:
        with pytest.raises(DataError) as caught:
            rows[index]
        assert str(caught.value).startswith(reason)


def test_wrong_kind_of_file_says_which_kind_it_is(jsonl):
    path = jsonl([{"messages": [USER, BOT]}])
    with pytest.raises(DataError, match=":1: prompt: column is missing.*those of sft rows"):
        RowDataset(path, "rm")
    with pytest.raises(DataError, match="has no rows"):
        RowDataset(jsonl([], "empty.jsonl"), "rl")


def test_damaged_files_are_data_errors(jsonl, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "a.jsonl.gz").write_bytes(b"nothing")
    for name in ("a.parquet", "a.jsonl.gz", "absent.jsonl"):
        with pytest.raises(DataError, match=name):
            RowDataset(tmp_path / name, "rl")


def test_prompt_dataset_through_a_plain_dataloader(jsonl):
    talk = [{"role": "system", "content": "s"}, USER, BOT, {"role": "user", "content": "more"}]
    path = jsonl([{"prompt": "plain"}, {"prompt": talk}, {"prompt": [USER]}])
    dataset = PromptDataset(file_path=str(path), tokenizer=None)
    [batch] = DataLoader(dataset, batch_size=3)
    assert batch["prompt"] == ["plain", "more", "hi"]
    assert all(type(prompt) is PromptText for prompt in batch["prompt"])
    # B06: chats of different and of equal length stay separate objects.
    assert [prompt.messages for prompt in batch["prompt"]] == [None, talk, [USER]]
    [batch] = DataLoader(dataset, batch_size=3, num_workers=1)
    assert [prompt.messages for prompt in batch["prompt"]] == [None, talk, [USER]]


def test_b06_two_chats_of_two_turns_are_two_items(jsonl):
    chat = [{"role": "system", "content": "s"}, USER]
    [batch] = DataLoader(PromptDataset(jsonl([{"prompt": chat}] * 2)), batch_size=2)
    assert len(batch["prompt"]) == 2 and batch["prompt"][0].messages == chat


def test_prompt_dataset_checks_prompts_when_it_has_a_tokenizer(
    jsonl, chat_tokenizer, strict_tokenizer, raw_tokenizer
):
    path = jsonl([{"prompt": [USER]}, {"prompt": [USER, USER]}])
    assert len(PromptDataset(path, chat_tokenizer)) == 2
    with pytest.raises(DataError, match=rf"{path}:2: prompt: .*user, user.*must alternate"):
        PromptDataset(path, strict_tokenizer)
    # B09: messages need a template; plain text does not.
    with pytest.raises(DataError, match=rf"{path}:1: prompt: .*chat_template"):
        PromptDataset(path, raw_tokenizer)
    assert len(PromptDataset(jsonl([{"prompt": "w w"}], "p.jsonl"), raw_tokenizer)) == 1
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        PromptDataset(path, prompt_length=5)


def test_prompt_dataset_applies_the_limit(jsonl, raw_tokenizer):
    path = jsonl([{"prompt": "w w w"}, {"prompt": "w"}])
    assert len(PromptDataset(path, raw_tokenizer, prompt_length=3)) == 2
    with pytest.raises(DataError, match=rf"{path}:1 \(3 tokens\)"):
        PromptDataset(path, raw_tokenizer, prompt_length=2)
    kept = PromptDataset(path, raw_tokenizer, prompt_length=2, overlong="drop")
    assert [item["prompt"] for item in kept] == ["w"]


def test_provider(jsonl):
    config = get_default_config()
    provider = DataProvider(config)
    with pytest.raises(ConfigError, match="data.train is not set; .*data.train=data/rm/train"):
        provider.train("rm")
    config.data.train = str(jsonl(ROWS))
    config.data.max_rows = 7
    assert len(provider.train("rl")) == 7
    config.data.eval = "absent.parquet"
    with pytest.raises(DataError, match="data.eval: absent.parquet: no such file"):
        provider.eval("rl")


def test_provider_takes_a_plain_mapping(jsonl):
    assert DataProvider({}).config == get_default_config()
    path = str(jsonl(ROWS))
    assert len(DataProvider(config={"data": {"train": path}}).train("rl")) == 50
    with pytest.raises(ConfigError, match="data.trian.*did you mean 'data.train'"):
        DataProvider({"data": {"trian": path}})


def test_import_paths():
    assert verl.data.DataProvider is DataProvider
    assert verl.utils.data.PromptDataset is PromptDataset
    with pytest.raises(AttributeError):
        verl.data.Nothing  # noqa: B018


def test_prompt_text_is_a_string_that_survives_pickling():
    text = PromptText("hi", [USER])
    again = pickle.loads(pickle.dumps(text))
    assert again == "hi" and again.messages == [USER]
    assert json.dumps(text) == '"hi"' and PromptText("x").messages is None

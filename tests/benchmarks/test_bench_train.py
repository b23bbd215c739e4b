"""The trainer benchmark gives both trainers the same batch and compares their gradients."""

import torch

from benchmarks.memory import table_mb
from benchmarks.train import SIBLINGS, cosine, credited, ragged, worth
from unstale.records import collate


def test_both_contestants_get_the_same_batch() -> None:
    rows = ragged(2, 1024)
    assert rows == ragged(2, 1024) and rows != ragged(2, 1024, seed=1) and len(rows) == 2 * SIBLINGS
    batch = collate(credited(rows))
    for each, (start, end) in zip(rows, batch.spans(), strict=True):
        prompt = len(each["prompt_ids"])
        assert batch.tokens[start:end].tolist() == each["prompt_ids"] + each["completion_ids"]
        assert batch.sampled[start:end].long().tolist() == [0] * prompt + each["tool_mask"]
        own = batch.advantage[start:end][batch.sampled[start:end]]
        torch.testing.assert_close(own, torch.full_like(own, each["advantage"]))
    assert rows[0]["prompt_ids"] == rows[7]["prompt_ids"] != rows[8]["prompt_ids"]


def test_gradients_are_compared_by_direction() -> None:
    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert (
        cosine(one, {"a": torch.tensor([6.0, 0.0]), "b": torch.tensor([8.0]), "c": torch.ones(1)})
        > 0.999999
    )
    assert cosine(one, {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([-3.0])}) == 0
    assert worth("w3 w4 ?") == 0.5 and table_mb(2**10) == 1

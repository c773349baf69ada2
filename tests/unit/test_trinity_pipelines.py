"""Trinity-RFT's data pipelines and further buffers, as its keys become ours."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.elsewhere.reading import flat
from leeway.elsewhere.table import Fate, Theirs, Unusable
from leeway.elsewhere.trinity import TRINITY
from leeway.elsewhere.trinity_pipelines import to_buffers, to_operators, to_prepared, tree
from leeway.elsewhere.trinity_tasks import to_reuse

LENGTHS = {"text_length_filter": {"min_len": 5}}


def theirs(given: dict[str, Any]) -> Theirs:
    return Theirs(flat(given), TRINITY.defaults)


def operators(*steps: dict[str, Any], **rest: Any) -> Fate:
    pipeline = {"operators": list(steps), "save_input": True, **rest.pop("pipeline", {})}
    return to_operators(theirs({"data_processor": {"experience_pipeline": pipeline}, **rest}))


def test_operators_on_experiences_keep_their_order() -> None:
    found = operators(
        {"name": "invalid_reward_filter"},
        {"name": "data_juicer", "args": {"operators": [LENGTHS, {"name": "special_characters_filter"}]}},
        {"name": "reward_std_filter", "args": {"threshold": 0}},
        {"name": "pass_rate_calculator"},
    )
    filters = {"data_juicer": {"process": [LENGTHS, {"special_characters_filter": {}}]}}
    assert (found.kind, found.ours) == ("approximate", {"replay.operators": [filters, "filter_zero_variance"]})
    assert operators({"name": "reward_std_filter"}).kind == "exact"
    assert "above 0 counts as 0" in operators({"name": "reward_std_filter", "args": {"threshold": 0.1}}).why
    own = {"algorithm": {"advantage_fn_args": {"std_threshold": 0.0}}}
    assert operators({"name": "reward_std_filter"}, **own).ours == {"replay.operators": ["filter_zero_variance"]}
    assert operators().ours == {}
    assert operators({"name": "reward_std_filter"}, algorithm={"algorithm_type": "sft"}).ours == {}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"name": "data_juicer", "args": {"config_path": "dj.yaml"}}, "put its `process` under replay.operators"),
        ({"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": [{"stats_key": "q"}]}}, "of your own"),
        ({"name": "reward_filter"}, "filter_reward goes by the mean"),
        ({"name": "outlier_reward_filter"}, "no operator outlier_reward_filter here"),
    ],
)
def test_what_would_train_something_else_is_refused(step: dict[str, Any], says: str) -> None:
    found = operators({"name": "reward_std_filter"}, step)
    assert (found.kind, found.ours) == ("refused", {})
    assert says in found.why


def test_further_inputs_and_names_alone_are_refused() -> None:
    assert "replay.buffers" in operators(pipeline={"inputs": {"more": {"path": "x.jsonl"}}}).why
    assert "shape_reward" in operators(pipeline={"reward_shaping": [{"stats_key": "q"}]}).why
    assert operators(pipeline={"operators": ["reward_std_filter"]}).kind == "refused"


def test_tasks_are_prepared_by_a_command_where_there_is_anything_to_do() -> None:
    def found(**pipeline: Any) -> Fate:
        return to_prepared(theirs({"data_processor": {"task_pipeline": pipeline}}))

    assert found(inputs=["a.jsonl"], num_process=4, operators=[], top_k=-1).kind == "ignored"
    for own in ({"operators": [{"name": "x"}]}, {"top_k": 10}, {"priority_weights": {"difficulty": 1.0}}):
        assert found(**own).kind == "refused"
        assert "leeway prepare" in found(**own).why


def test_auxiliary_buffers_are_those_of_mix_and_no_databases() -> None:
    def buffers(**own: Any) -> Theirs:
        return theirs({"buffer": {"trainer_input": {"auxiliary_buffers": {"experts": own}}}})

    assert to_buffers(buffers(path="e.jsonl"), mixes=True).kind == "exact"
    assert "replay.buffers" in to_buffers(buffers(path="e.jsonl"), mixes=False).why
    assert "serialized" in to_buffers(buffers(path="sqlite:///e.db", storage_type="sql"), mixes=True).why


def test_a_priority_queue_keeps_its_decay() -> None:
    def reuse(**own: Any) -> Fate:
        return to_reuse(theirs({"buffer": {"trainer_input": {"experience_buffer": {"replay_buffer": own}}}}))

    assert reuse(enable=True, priority_fn="linear_decay", priority_fn_args={"decay": 0.3}).ours == {
        "replay.sampling": "priority",
        "replay.priority": "newest",
        "replay.priority_decay": 0.3,
    }
    assert reuse(enable=False, priority_fn="mine").kind == "ignored"
    assert "no priority decay_limit_randomization" in reuse(enable=True, priority_fn="decay_limit_randomization").why


def test_a_tree_is_what_was_laid_flat_and_no_index_makes_a_list_of_its_length() -> None:
    given = {"a": [{"b": {"c": [1, 2]}}, {"d": None}], "e": "f"}
    assert tree(flat(given)) == given
    for key in ("a[999999999].b", "a[0][0].b", "[0].a"):
        with pytest.raises(Unusable):
            tree({"a[0].b": 1, key: 2})

"""Samples of an engine: mean and maximum of a step, and no way to fail the engine that reports them."""

from __future__ import annotations

from types import SimpleNamespace

from recipes.generation.engine import EngineSamples


def scheduler(running: int, waiting: int, cache: float) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=cache,
        spec_decoding_stats=None,
    )


def test_what_lies_between_two_calls_is_summed_up_once():
    samples = EngineSamples()
    assert samples.take() == {}
    for running, waiting, cache in ((1, 0, 0.25), (3, 2, 0.75)):
        samples.record(scheduler(running, waiting, cache), SimpleNamespace(num_generation_tokens=running), engine_idx=0)
        samples.sample()
    assert samples.take() == {
        "inflight_batch_sizes/mean": 2.0,
        "inflight_batch_sizes/max": 3.0,
        "num_pending_samples/mean": 1.0,
        "num_pending_samples/max": 2.0,
        "kv_cache_usage_perc/mean": 0.5,
        "kv_cache_usage_perc/max": 0.75,
        "generation_tokens": 4.0,
    }
    assert samples.take() == {}


def test_drafts_are_counted_between_two_calls():
    samples, stats = EngineSamples(), scheduler(1, 0, 0.5)
    stats.spec_decoding_stats = SimpleNamespace(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    for _ in range(2):
        samples.record(stats, None)
    samples.sample()
    taken = samples.take()
    drafted = {name: value for name, value in taken.items() if name.startswith("spec_")}
    assert drafted == {"spec_num_drafts": 4.0, "spec_num_draft_tokens": 12.0, "spec_num_accepted_tokens": 6.0}
    samples.sample()
    assert not [name for name in samples.take() if name.startswith("spec_")]


def test_statistics_of_another_form_do_not_fail_the_engine(caplog):
    samples = EngineSamples()
    for _ in range(3):
        samples.record(None, None)
        samples.record(SimpleNamespace(), object(), mm_cache_stats=None)
    samples.sample()
    assert samples.take()["inflight_batch_sizes/max"] == 0.0
    assert len(caplog.records) == 1

"""Test the benchmark of the event loop: it counts the turns and tokens of real episodes."""

from benchmarks.event_loop import Case, carried, measure, table


def test_a_measurement_counts_turns_and_tokens() -> None:
    case = Case("scripted", 8192, 2, routes=True)
    (figures,) = measure("scripted", [case])
    assert figures["turns"] == 2 * case.episodes == 16
    assert figures["tokens"] == 16 * 8192
    assert figures["stall_s"] > 0
    assert carried([figures], "loop_s", "turns") == 16 / figures["loop_s"]
    assert "| scripted | 8,192 | 2 | yes |" in table([case], {case: [figures]})[-1]

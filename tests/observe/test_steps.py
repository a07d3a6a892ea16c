"""The step log keeps the last records; a record's parts add up."""

from dataclasses import replace

from raysonar.observe.steps import Decisions, StepLog, StepRecord


def record(number):
    return StepRecord(
        number=number,
        rows=1,
        prefill_tokens=0,
        decode_tokens=2,
        drafted=1,
        accepted=1,
        halves=2,
        reason="gain",
        predicted_seconds=2.0,
        plan_seconds=8.0,
        wait_seconds=0.25,
        verify_seconds=1.5,
        verify_exposed_seconds=0.5,
        draft_seconds=0.75,
        draft_exposed_seconds=0.125,
    )


def test_the_log_keeps_the_last_records_oldest_first():
    log = StepLog(3)
    for number in range(5):
        log.append(record(number))
    assert [each.number for each in log.last()] == [2, 3, 4]
    assert [each.number for each in log.last(2)] == [3, 4]
    assert log.last(0) == []
    assert len(log.last(9)) == 3


def test_a_record_adds_up_its_times():
    assert (record(0).seconds, record(0).wait_share, record(0).exposed_seconds) == (2.5, 0.1, 0.625)


def test_decisions_add_up_what_was_expected_and_what_came():
    decisions = Decisions()
    first = replace(record(0), reason="gain", predicted_seconds=2.0)
    second = replace(record(1), reason="gain", predicted_seconds=3.0)
    for each in (first, second, replace(record(2), reason="no gain", predicted_seconds=None)):
        decisions.count(each)
    took = first.verify_seconds + first.draft_seconds
    both = decisions + Decisions()
    assert both.reasons == {"gain": 2, "no gain": 1}
    assert (both.predicted_seconds, both.measured_seconds) == (5.0, 2 * took)
    assert both.error_seconds == abs(2.0 - took) + abs(3.0 - took)

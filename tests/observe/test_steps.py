"""The step log keeps the last records."""

from raysonar.observe.steps import StepLog, StepRecord


def record(number):
    return StepRecord(
        number=number,
        rows=1,
        prefill_tokens=0,
        decode_tokens=2,
        drafted=1,
        accepted=1,
        plan_seconds=0.0,
        verify_seconds=0.0,
        draft_seconds=0.0,
    )


def test_the_log_keeps_the_last_records_oldest_first():
    log = StepLog(3)
    for number in range(5):
        log.append(record(number))
    assert [each.number for each in log.last()] == [2, 3, 4]
    assert [each.number for each in log.last(2)] == [3, 4]
    assert log.last(0) == []
    assert len(log.last(9)) == 3

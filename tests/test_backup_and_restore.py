"""A training that is killed and restarted ends with the same bits as a training without interruption."""

import collections
import concurrent.futures
import contextlib
import datetime
import gc
import io
import json
import pathlib
import random
import signal
import threading
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import backup_checks as checks
import tfdist
from tfdist.backup import (
    backed_up_fit,
    between_fits,
    commit_writer,
    random_states,
    save_schedule,
    serialization,
    snapshot,
    step_counter,
    variable_states,
)
from tfdist.backup import chief_decision as agreement
from tfdist.backup.callback_states import CallbackStates
from tfdist.backup.sharding_positions import ShardingPositions
from tfdist.backup.state_provider import CapturedState, StateProvider, TrainedFit
from tfdist.errors import BackupError, PositionError
from tfdist.events.phase_names import AGREEING
from tfdist.faults import beside_steps, coordination_store, peer_probe, preemption
from tfdist.testing import WorkerPool


def assert_equal(resumed, unbroken):
    assert resumed["histories"] == unbroken["histories"]
    assert resumed["between"] == unbroken["between"], "what comes between two fits sees what it saw before"
    assert resumed["metrics"] == unbroken["metrics"]
    assert resumed["random"] == unbroken["random"]
    assert resumed["log"] == unbroken["log"]
    for kind in ("weights", "optimizer"):
        for mine, other in zip(resumed[kind], unbroken[kind], strict=True):
            np.testing.assert_array_equal(mine, other, strict=True)
    assert resumed["residual"] == unbroken["residual"]


@pytest.fixture(autouse=True)
def no_training_listens():
    """Ends the watches of broken trainings, since the process of the tests would answer later signals as they do."""
    yield
    while preemption._installed is not None:
        preemption.uninstall()


def by_default(rows, names):
    """Returns the names of `rows`, marked `exhaustive` unless they are in `names`."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.exhaustive) for name in rows]


# Each training runs in one process: an exception breaks the training off, and a new model continues from the backup.
ROWS = {
    "epochs": {"breaks": [8, 15], "save_freq": "epoch", "model": {"jit": True}},
    "steps": {"breaks": [5, 10], "save_freq": 4},
    "each step, and at the end of an epoch": {"breaks": [6, 7, 12, 18], "save_freq": 1},
    "last in the list": {"breaks": [10, 14], "save_freq": 4, "position": "last"},
    "monitors, epochs": {"breaks": [7, 13], "save_freq": "epoch", "monitors": True},
    "monitors, steps": {"breaks": [7, 13], "save_freq": 5, "monitors": True, "position": "last"},
    "unshuffled arrays": {"breaks": [9], "save_freq": 4, "data_kind": "unshuffled"},
    "dataset": {"breaks": [9, 15], "save_freq": 4, "data_kind": "dataset"},
    "dataset of unknown length": {"breaks": [4, 15], "save_freq": 4, "data_kind": "generator"},
    "endless dataset": {"breaks": [4, 15, 19], "save_freq": 4, "data_kind": "endless"},
    "endless dataset, epochs": {"breaks": [8, 19], "save_freq": "epoch", "data_kind": "endless"},
    "epochs shorter than the data": {"breaks": [4, 8, 10], "save_freq": 2, "data_kind": "known"},
    "epochs shorter than the data, epochs": {"breaks": [5, 8, 10], "save_freq": "epoch", "data_kind": "known"},
    "PyDataset": {"breaks": [5, 9, 11, 15], "save_freq": 4, "data_kind": "PyDataset"},
    "PyDataset, epochs": {"breaks": [8, 10], "save_freq": "epoch", "data_kind": "PyDataset of shorter epochs"},
    "PyDataset, epochs shorter": {"breaks": [5, 8, 11], "save_freq": 2, "data_kind": "PyDataset of shorter epochs"},
    "PyDataset that draws": {"breaks": [9, 13], "save_freq": 4, "data_kind": "PyDataset that draws"},
    "PyDataset that draws, each step": {"breaks": [5, 13], "save_freq": 1, "data_kind": "PyDataset that draws"},
    "endless dataset that draws": {"breaks": [4, 8, 10], "save_freq": 2, "data_kind": "draws, endless"},
    "endless dataset that draws, epochs": {"breaks": [5, 8], "save_freq": "epoch", "data_kind": "draws, endless"},
    "metric that is a vector": {"breaks": [8, 11], "save_freq": 3, "model": {"vectors": True}},
    "train function made anew": {"breaks": [15], "save_freq": 4, "data_kind": "endless", "anew": True},
    "unseeded noise": {"breaks": [9, 15], "save_freq": 4, "model": {"noise": True}},
    "steps_per_execution": {"breaks": [8, 14], "save_freq": 4, "model": {"steps": 2}},
    "accumulation": {"breaks": [4], "save_freq": 3, "model": {"accumulate": 2}},
    "loss scale": {"breaks": [9, 15], "save_freq": 4, "model": {"scaled": True}},
    "balanced": {"breaks": [9, 15], "save_freq": 4, "data_kind": "balanced"},
}


SOME_ROWS = ["PyDataset that draws", "metric that is a vector", "monitors, steps"]


@pytest.mark.parametrize("row", by_default(ROWS, SOME_ROWS))
def test_a_fit_interrupted_and_resumed_without_a_strategy_equals_one_fit(row, pools, tmp_path):
    resumed, unbroken = pools("single").run(
        checks.broken_off_and_unbroken, "plain", str(tmp_path / "backup"), **ROWS[row]
    )[0]
    assert_equal(resumed, unbroken)
    assert resumed["counts"] == unbroken["counts"], "a user's callback has seen each hook once"
    assert not (tmp_path / "backup").exists()


REPLICATED = {
    "arrays": {"breaks": [9, 15], "save_freq": 4},
    "accumulation": {"breaks": [4, 9], "save_freq": 3, "model": {"accumulate": 2}, "compressed": "int8"},
    "unseeded noise": {"breaks": [9, 15], "save_freq": 4, "model": {"noise": True}},
    "residuals": {"breaks": [3, 8, 15], "save_freq": 3, "compressed": "int8"},
    "steps_per_execution that leaves a rest": {"breaks": [10, 16], "save_freq": 4, "model": {"steps": 4}},
    "balanced": {"breaks": [15], "save_freq": 4, "data_kind": "balanced", "compressed": "powersgd"},
    "sharded": {"breaks": [9], "save_freq": 4, "sharding": "optimizer", "model": {"accumulate": 2, "averages": True}},
    "sharded, residuals": {"breaks": [3, 8], "save_freq": 3, "sharding": "optimizer", "compressed": "int8"},
    "divided": {"breaks": [9], "save_freq": 4, "sharding": "parameters", "model": {"width": 1024, "accumulate": 2}},
    "LocalSGD": {"breaks": [9], "save_freq": 4, "synchronization": "LocalSGD"},
    "DiLoCo": {"breaks": [3, 8], "save_freq": 3, "synchronization": "DiLoCo", "compressed": "int8"},
    "streaming": {"breaks": [3, 8], "save_freq": 3, "synchronization": "streaming", "compressed": "int8"},
    "balanced, evaluates": {"breaks": [15], "save_freq": 4, "data_kind": "balanced", "evaluates": True},
    "balanced, epochs": {"breaks": [8, 15], "save_freq": "epoch", "data_kind": "balanced"},
    "balanced, shorter epochs": {"breaks": [5], "save_freq": 2, "data_kind": "balanced, shorter epochs"},
}


@pytest.mark.parametrize("row", by_default(REPLICATED, ["balanced", "streaming"]))
def test_a_fit_interrupted_and_resumed_on_two_devices_equals_one_fit(row, pools, tmp_path):
    resumed, unbroken = pools("1x2").run(
        checks.broken_off_and_unbroken, "1x2", str(tmp_path / "backup"), **REPLICATED[row]
    )[0]
    assert_equal(resumed, unbroken)
    assert not unbroken["exchanges"] or resumed["exchanges"] < unbroken["exchanges"], "of this process only"


def test_a_fit_resumed_on_workers_while_a_fragment_travels_equals_one_fit(pools, tmp_path):
    for resumed, unbroken in pools("2x1").run(
        checks.broken_off_and_unbroken, "2x1", str(tmp_path / "backup"), **REPLICATED["streaming"]
    ):
        assert_equal(resumed, unbroken)


FITS = {"fits": 2, "delete_checkpoint": False}
KILLED = {
    "a process": ("plain", 1, 1, [[0, 13]], {"save_freq": 4, "monitors": True}),
    "in the second fit": ("plain", 1, 1, [[0, 9], [0, 29]], {"save_freq": 4, "model": {"vectors": True}, **FITS}),
    "two devices": ("1x2", 1, 2, [[0, 9], [0, 15]], {"save_freq": 4, "data_kind": "balanced", "compressed": "int8"}),
    "two devices, in the second fit": (
        *("1x2", 1, 2, [[0, 29]]),
        {"save_freq": 4, "data_kind": "balanced", "compressed": "powersgd", "compiled_anew": True, **FITS},
    ),
    "two workers": (
        *("2x1", 2, 1, [[0, 13]]),
        {"save_freq": 4, "data_kind": "balanced", "compressed": "int8", "monitors": True},
    ),
    "two workers, both": (
        *("2x1", 2, 1, [[0, 9], [1, 15]]),
        {"save_freq": 4, "data_kind": "balanced", "compressed": "int8"},
    ),
    "two workers, DiLoCo": (
        *("2x1", 2, 1, [[0, 9], [1, 15]]),
        {"save_freq": 4, "data_kind": "balanced", "synchronization": "DiLoCo", "compressed": "int8"},
    ),
    "two devices, sharded": (
        *("1x2", 1, 2, [[0, 13]]),
        {"save_freq": 4, "data_kind": "balanced", "sharding": "optimizer", "model": {"optimizer": "muon"}},
    ),
    "two workers, sharded": (
        *("2x1", 2, 1, [[0, 9], [1, 15]]),
        {"save_freq": 4, "data_kind": "balanced", "sharding": "optimizer", "model": {"averages": True}},
    ),
    "two workers, sharded and encoded": (
        *("2x1", 2, 1, [[1, 7]]),
        {"save_freq": 4, "sharding": "optimizer", "compressed": "int8", "model": {"accumulate": 2}},
    ),
    "two workers of two devices, sharded": (
        *("2x2", 2, 2, [[1, 13]]),
        {"save_freq": 4, "data_kind": "balanced", "sharding": "optimizer", "model": {"optimizer": "adafactor"}},
    ),
    "two workers of two devices, in groups": (
        *("2x2", 2, 2, [[1, 13]]),
        {"save_freq": 4, "data_kind": "balanced", "sharding": "optimizer", "group_size": 2},
    ),
    "two workers, divided": (
        *("2x1", 2, 1, [[0, 9], [1, 15]]),
        {"save_freq": 4, "data_kind": "balanced", "sharding": "parameters", "model": {"width": 1024, "averages": True}},
    ),
}


# By default, test_supervise.py kills a worker of an example.
@pytest.mark.exhaustive
@pytest.mark.parametrize("where", KILLED)
def test_killed_workers_resume_with_equal_results(where, pools, tmp_path):
    """SIGKILL ends the workers; other processes continue."""
    placement, workers, devices, kills, options = KILLED[where]
    directory = str(tmp_path / "backup")
    with WorkerPool(workers, devices, timeout_seconds=400) as pool:
        for kill in kills:
            with pytest.raises(Exception, match=r"SIGKILL|signal 9|killed"):
                pool.run(checks.train, placement, directory, break_off=kill, kills=True, **options)
    newest = max(int(path.name.partition("-")[2]) for path in pathlib.Path(directory).glob("step-*"))
    assert newest > 4
    others = pools("single" if placement == "plain" else placement)
    resumed = others.run(checks.train, placement, directory, **options)
    unbroken = others.run(checks.unbroken, placement, **options)
    for mine, other in zip(resumed, unbroken, strict=True):
        assert_equal(mine, other)
    assert pathlib.Path(directory).exists() == (options.get("delete_checkpoint") is False)


@pytest.mark.parametrize("position", [pytest.param("first", marks=pytest.mark.exhaustive), "last"])
def test_a_finished_fit_is_skipped_with_the_state_of_its_end(position, pools, tmp_path):
    check, directory = checks.broken_off_in_the_second_fit, str(tmp_path / "backup")
    resumed, unbroken = pools("single").run(check, directory, delete_checkpoint=False, position=position)[0]
    assert_equal(resumed, unbroken)
    assert resumed["counts"] == unbroken["counts"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="compiled once", marks=pytest.mark.exhaustive),
        pytest.param(
            {"compiled_anew": True, "save_freq": 3, "model": {"optimizer": "sgd", "steps": 2}},
            id="compiled anew",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"model": {"averages": True}}, id="averages of weights"),
    ],
)
def test_a_finished_fit_without_a_backup_of_its_end_is_skipped_with_later_state(options, pools, tmp_path):
    check, directory = checks.broken_off_in_the_second_fit, str(tmp_path / "backup")
    resumed, unbroken = pools("single").run(check, directory, **options)[0]
    assert resumed["between"][0] != unbroken["between"][0]
    assert np.any(resumed["between"][0][0]), "trained weights, also where Keras replaces them by averages"
    assert_equal(resumed, {**unbroken, "between": resumed["between"]})


# Steps of the model after which starts break off in the second `fit`; the steps of this `fit` that each start trains.
SKIPPED = {
    "after a backup of its own": ([checks.STEPS + 3], {}, [3, 2 * checks.STEPS - 2]),
    "before one": ([checks.STEPS + 1], {"delete_checkpoint": False}, [1, 2 * checks.STEPS]),
    "before one, then after one": ([checks.STEPS + 1, 5], {"delete_checkpoint": False}, [1, 5, 2 * checks.STEPS - 4]),
}


@pytest.mark.parametrize("moment", by_default(SKIPPED, ["before one, then after one"]))
def test_a_script_that_skips_a_finished_fit_continues_with_the_next(moment, pools, tmp_path):
    breaks, options, expected = SKIPPED[moment]
    check, directory = checks.skipped_in_later_starts, str(tmp_path / "backup")
    trained, resumed, unbroken = pools("single").run(check, directory, breaks, **options)[0]
    assert trained == expected
    if breaks[0] > checks.STEPS + 1:  # otherwise the script sets the model's weights
        for mine, other in zip(resumed, unbroken, strict=True):
            np.testing.assert_array_equal(mine, other, strict=True)


def test_a_fit_that_a_callback_stopped_is_logged_as_done(tmp_path, caplog):
    directory = str(tmp_path / "backup")
    for _ in range(2):
        model = checks.build(None)
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, model=model: setattr(model, "stop_training", epoch == 1)
        )
        backup = tfdist.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
        done = model.fit(*checks.data(), epochs=4, verbose=0, callbacks=[stop, backup])
        assert done.epoch == [0, 1]
        between_fits.processes.pop(directory)  # as in another process
    told = [record.getMessage() for record in caplog.records if "Restored" in record.getMessage()]
    assert len(told) == 1 and "a callback stopped this fit at the end of epoch 2" in told[0], told
    assert "continues after" not in told[0]


def test_a_fit_handles_signals_only_while_it_runs(tmp_path):
    heard, handlers = [], []

    def train(name, *others):
        backup = tfdist.callbacks.BackupAndRestore(tmp_path / name)
        checks.build(None).fit(*checks.data(), epochs=1, verbose=0, callbacks=[*others, backup])

    def train_within(epoch, logs):
        train("within")
        handlers.append(signal.getsignal(signal.SIGTERM))

    def interrupt(batch, logs):
        raise KeyboardInterrupt

    def mine(signum, frame):
        heard.append(signum)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        train("outer", keras.callbacks.LambdaCallback(on_epoch_end=train_within))
        assert handlers[0] is not mine and signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(KeyboardInterrupt):
            train("interrupted", keras.callbacks.LambdaCallback(on_train_batch_end=interrupt))
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_unsuitable_backup_is_refused_before_training_and_kept(pools, tmp_path):
    said, untouched = pools("single").run(checks.refusals, str(tmp_path / "backup"))[0]
    assert "dense/kernel of shape (9, 16)" in said["another shape"] and "(9, 17)" in said["another shape"]
    assert "another model or optimizer" in said["another optimizer"]
    assert "/proc/backup" in said["not writable"]
    assert "one BackupAndRestore" in said["twice"]
    assert "but second of model" in said["optimizer not built"]
    assert untouched


def test_shorter_epochs_than_the_backup_are_refused_and_nothing_is_lost(pools, tmp_path):
    said, untouched = pools("single").run(checks.fewer_batches, str(tmp_path / "backup"))[0]
    assert len(said) == 2 and all("after batch 5 of 6 of an epoch, but an epoch has 2 now" in each for each in said)
    assert untouched


def test_a_backup_of_other_data_is_refused_before_any_restore(pools, tmp_path):
    said, *untouched = pools("single").run(checks.other_data, str(tmp_path / "backup"))[0]
    assert "seed was 0, is 1" in said and "another backup_dir" in said
    assert untouched == [True, True]


def test_variables_with_parts_on_each_replica_are_not_read_for_a_callback(pools):
    assert pools("1x2").run(checks.refused_parts_of_replicas, "1x2") == [[True, False]]


def test_a_full_disk_costs_one_save_only(pools, tmp_path):
    meanwhile, in_the_end = pools("single").run(checks.full_disk, str(tmp_path / "backup"))[0]
    assert meanwhile == [4]
    assert in_the_end == [16, 18]


def test_restored_sums_do_not_grow_with_the_number_of_replicas(pools, tmp_path):
    resumed, alone = pools("1x2").run(checks.resumed_with_more, str(tmp_path / "backup"))[0]
    for mine, other in zip(resumed, alone, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


# Minutes between saves, seconds of each step, the longest time without a save in minutes.
PACES = {
    "slower steps": (10, [0.1 + (300 if step % 100 == 0 else 0) for step in range(1, 4001)], 25),
    "long steps": (5, [120] * 10, 7),
}


@pytest.mark.parametrize("pace", PACES)
def test_saves_by_time_follow_long_and_slower_steps(pace, monkeypatch):
    minutes, seconds, longest_minutes = PACES[pace]
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(save_schedule, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    agreement = types.SimpleNamespace(settle=lambda subject, said, decide: decide(None))
    due = save_schedule.SaveSchedule(datetime.timedelta(minutes=minutes), agreement, 0)
    saves = []
    for step, each in enumerate(seconds, 1):
        clock.now += each
        if due.is_due(step):
            saves.append(clock.now / 60)
    assert np.all(np.diff([0, *saves, clock.now / 60]) < longest_minutes), saves


def test_batches_to_skip_do_not_carry_over_to_the_next_fit():
    counted = step_counter.CountedSteps(lambda iterator: next(iterator), 1)
    counted.pass_over(3, 0, lambda _: None, reads=True, runs_last=False, logs=None)
    first = iter(range(9))
    assert [counted(first), counted(first)] == [None, None]
    assert counted(iter(range(9))) == 0


def test_a_train_on_batch_of_a_callback_does_not_count_as_a_step():
    model = checks.build(None)
    model.make_train_function()
    x, y = checks.data()
    rows = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(checks.BATCH))
    counted = step_counter.count_steps(model)
    try:
        for _ in range(2):
            model.train_function(rows)
            model.train_on_batch(x[:3], y[:3])
    finally:
        step_counter.uncount_steps(model)
    assert counted.consumed == 2 and counted.iterator is rows
    assert keras.ops.convert_to_numpy(model.optimizer.iterations) == 4


def broken_off(directory, step, **options):
    """Interrupts a `fit` after a step by an exception, and leaves its backups as another process would."""
    with contextlib.suppress(checks.BrokenOffError):
        fit_on(directory, checks.BreakOff(step, kills=False), epochs=4, save_freq=1, **options)
    checks.await_save()
    another_process(directory)


def another_process(directory):
    between_fits.processes.pop(directory).store.release()


def fit_on(directory, *others, epochs=1, initial_epoch=0, **options):
    backup = tfdist.callbacks.BackupAndRestore(directory, **options)
    model = checks.build(None)
    model.run_eagerly = True  # most of a few steps' time is tracing
    rows = {"batch_size": checks.BATCH, "verbose": 0, "epochs": epochs, "initial_epoch": initial_epoch}
    return model.fit(*checks.data(), callbacks=[*others, backup], **rows)


def test_a_backup_beyond_the_fit_or_of_other_versions_is_logged_and_kept(tmp_path, caplog, monkeypatch):
    directory = str(tmp_path / "backup")
    with monkeypatch.context() as patched:
        patched.setattr(commit_writer, "versions", lambda: {"tfdist": "0.0.1", "keras": "3.99"})
        broken_off(directory, 2 * checks.STEPS + 3)
    fit_on(directory, epochs=2)
    told = [record.getMessage() for record in caplog.records]
    assert any("after 2 batches of epoch 3, but this fit ends with epoch 2: it trains nothing" in one for one in told)
    assert any("tfdist 0.0.1 (here: " in one and "keras 3.99 (here: " in one for one in told)
    another_process(directory)
    assert fit_on(directory, epochs=3, initial_epoch=1).epoch == [0, 1, 2] and not (tmp_path / "backup").exists()


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.exhaustive), checks.STEPS + 3])
def test_the_epoch_of_a_backup_overrides_a_later_initial_epoch(step, tmp_path, caplog):
    broken_off(str(tmp_path / "backup"), step)
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    done = fit_on(str(tmp_path / "backup"), note, epochs=3, initial_epoch=2)
    assert done.epoch == [0, 1, 2]
    assert len(seen) == 3 * checks.STEPS - (step - 1) and seen[0] == (step - 1) % checks.STEPS
    told = [record.getMessage() for record in caplog.records if "Restored" in record.getMessage()]
    assert len(told) == 1 and f"of epoch {step // checks.STEPS + 1}, although initial_epoch is 2" in told[0], told


def test_each_fit_uses_its_own_backup_dir_and_keep(tmp_path, monkeypatch, caplog):
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "latest.weights.h5").write_bytes(b"of Keras")
    monkeypatch.chdir(tmp_path)
    for keep, number in ((1, 1), (3, 4)):
        away = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: monkeypatch.chdir("/"))
        fit_on("backup", away, save_freq=np.int64(1), keep=keep, delete_checkpoint=False)
        assert len(list((tmp_path / "backup").glob("step-*"))) == number  # includes the end of fit 1
        monkeypatch.chdir(tmp_path)
    another_process(str(tmp_path / "backup"))
    assert sum("Keras' own BackupAndRestore" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("append", [False, True])
def test_a_csv_file_has_each_epoch_once_also_if_its_fit_is_skipped(append, tmp_path):
    logs = [tmp_path / "fit1.csv", tmp_path / "fit2.csv"]
    for log in logs:
        log.write_text("epoch,old\n")
    for step in (checks.STEPS + 3, 3 * checks.STEPS):  # The second start comes to the end.
        broken = checks.BreakOff(step, kills=False)
        with contextlib.suppress(checks.BrokenOffError):
            for log, others in zip(logs, ([], [broken]), strict=True):
                logger = tfdist.callbacks.CSVLogger(log, append=append)
                fit_on(str(tmp_path / "backup"), logger, *others, epochs=2, save_freq=1)
        checks.await_save()
        another_process(str(tmp_path / "backup"))
    for log in logs:
        assert [line.partition(",")[0] for line in log.read_text().splitlines()] == ["epoch", "0", "1"]
        assert ("old" in log.read_text()) == append


def test_a_model_is_freed_after_a_fit_with_backups(tmp_path):
    model, stop = checks.build(None), keras.callbacks.EarlyStopping(monitor="loss")
    model.run_eagerly = True
    backup = tfdist.callbacks.BackupAndRestore(tmp_path / "backup")
    batches = tf.data.Dataset.from_tensor_slices(checks.data()).batch(checks.BATCH)
    model.fit(batches, verbose=0, callbacks=[stop, backup])
    gone = [weakref.ref(model), weakref.ref(stop)]
    del model, stop, backup
    gc.collect()
    assert [each() for each in gone] == [None, None]


class OfTwo:
    """An agreement with a second worker, which has a preemption request."""

    workers, own, is_chief, who = 2, 0, True, "Worker 0"

    def __init__(self, strategy, timeout_seconds):
        pass

    def begin(self, told):
        pass

    def settle(self, topic, said, decide):
        return decide([said, {"files": {}, "asked": True} if topic == "save" else said])


def test_all_workers_leave_with_a_preempted_worker_without_step_reports(tmp_path, monkeypatch):
    def leave(refusals, directory):
        left.append(batch)
        raise SystemExit

    left, directory = [], str(tmp_path / "backup")
    monkeypatch.setattr(backed_up_fit, "ChiefDecision", OfTwo)
    monkeypatch.setattr(preemption, "leave", leave)
    backup = tfdist.callbacks.BackupAndRestore(directory, save_freq=3)
    loop = keras.callbacks.CallbackList([backup], model=checks.build(None))
    loop.on_train_begin()
    loop.on_epoch_begin(0)
    with pytest.raises(SystemExit):
        for batch in range(9):
            loop.on_train_batch_end(batch)
    preemption.uninstall()
    another_process(directory)
    assert left == [5] and checks._steps(directory) == [3, 6], "with the second save"


REFUSED = {
    "save_freq": [True, 0, -1, 0.0, -2.0, float("nan"), float("inf"), 1e300, "batch", None, np.int64(0), [1]],
    "keep": [0, 1.5, None, "2"],
    "timeout_seconds": [0, -1, None, "1", float("nan")],
    "backup_dir": [""],
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=f"`{name}` must .*got "):
            tfdist.callbacks.BackupAndRestore(**{"backup_dir": "x", name: value})


def test_a_path_is_made_absolute_and_a_float_is_a_time(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/tmp")
    made = tfdist.callbacks.BackupAndRestore
    places = {"~/run": "/home/me/run", "./run": "/tmp/run", b"run": "/tmp/run", "gs://bucket/run": "gs://bucket/run"}
    assert {place: made(place).backup_dir for place in places} == places
    frequencies = {30.0: datetime.timedelta(seconds=30), np.float32(0.5): datetime.timedelta(seconds=0.5), 7: 7}
    assert {given: made("run", save_freq=given).save_freq for given in frequencies} == frequencies
    assert type(made("run", save_freq=np.int64(50)).save_freq) is int


@pytest.mark.parametrize("place", [pathlib.Path("gs://bucket/run"), "s3:/bucket"])
def test_a_path_that_has_lost_a_slash_is_refused(place):
    with pytest.raises(ValueError, match=r"shortened to one slash.*as a string"):
        tfdist.callbacks.BackupAndRestore(place)
    for other in ("gs://bucket/run", "./s3:/bucket", pathlib.Path("a:b/c"), "C:"):
        tfdist.callbacks.BackupAndRestore(other)


def states_of(callback, model=None):
    return CallbackStates(TrainedFit(model or keras.Sequential(), [callback]))


def as_saved(captured):
    return {
        name: {
            key: serialization.apart(json.loads(json.dumps(serialization.with_arrays(*own))))
            for key, own in of_one.items()
        }
        for name, of_one in captured.items()
    }


class Strange:
    """Raises an error at each look-up of an attribute."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class StrangeFunction(Strange):
    def __call__(self):
        pass


class Collects(keras.callbacks.Callback):
    """Holds `collections` types, values that can never or no longer be saved, and objects that are not state."""

    of_this_process = ("file", "thread", "future", "started")

    def __init__(self):
        super().__init__()
        self.last, self.counts = collections.deque(maxlen=3), collections.Counter()
        self.by_name, self.in_order = collections.defaultdict(list), collections.OrderedDict()
        self.events, self.best, self.phase = [], None, signal.SIGINT
        self.made, self.same = collections.defaultdict(lambda: 0), object()
        self.strange, self.function = Strange(), StrangeFunction()
        for name in self.of_this_process:
            setattr(self, name, None)

    def train(self):
        self.last.extend(range(5))
        self.counts.update("aab")
        self.by_name["loss"].append(np.float32(0.5))
        self.in_order.update({"b": collections.deque([1]), "a": (2,)})
        self.events.append(object())
        self.best, self.phase = np.longdouble(1), signal.SIGTERM
        self.file, self.thread = io.StringIO(), threading.Thread()
        self.future, self.started = concurrent.futures.Future(), datetime.datetime.now()


def test_collections_of_callbacks_are_saved_and_unsuitable_values_get_a_warning(caplog):
    callback, again = Collects(), Collects()
    states = states_of(callback)
    held, restored = again.last, states_of(again)
    callback.train()
    for _ in range(2):
        captured = states.changes()
    restored.put_back(as_saved(captured))
    for name in ("last", "counts", "by_name", "in_order"):
        mine, other = getattr(again, name), getattr(callback, name)
        assert type(mine) is type(other) and mine == other, name
    assert again.last is held and held.maxlen == 3 and again.by_name["new"] == []
    assert list(again.in_order) == ["b", "a"] and type(again.in_order["b"]) is collections.deque
    told = [record.getMessage() for record in caplog.records if "not saved completely" in record.getMessage()]
    assert len(told) == 3, "once; what is of this process is no state"
    assert all(
        "Collects" in each and f"'{name}'" in each for each, name in zip(told, ("events", "best", "phase"), strict=True)
    )


def told_of(name, caplog):
    """Returns the log messages about a callback. Threads of other tests of this process may log others."""
    return [record.getMessage() for record in caplog.records if name in record.getMessage()]


class Speaks(keras.callbacks.Callback):
    """A callback that reports its state by `get_state`."""

    made, state = None, 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_a_callback_with_get_state_gets_no_warning_about_other_attributes(caplog):
    callback, again = Speaks(), Speaks()
    callback.made = None
    states, restored = (states_of(each) for each in (callback, again))
    callback.made, callback.state = object(), 5
    restored.put_back(as_saved(states.changes()))
    assert again.state == 5 and not told_of("Speaks", caplog)


@pytest.mark.parametrize("make", [keras.metrics.Mean, lambda: {"mean": keras.metrics.Mean(), "best": 1}])
def test_a_state_that_cannot_be_saved_gets_a_warning(make, caplog):
    callback = Speaks()
    callback.state = make()
    states = states_of(callback)
    assert states.changes() == states.changes() == {next(iter(states.changes())): {}}
    (told,) = told_of("Speaks", caplog)
    assert "Speaks is not saved completely: the result of its get_state()" in told
    with pytest.raises(TypeError, match="Mean cannot be saved"):
        serialization.encode({keras.metrics.Mean()}, [], ())


class HoldsInPlace(keras.callbacks.Callback):
    """Holds objects that a restore must update in place, and the model's own variables."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.best = [kernels, {"both": tuple(kernels)}], None
        self.shadow = [tf.Variable(0.0), {"w": keras.Variable([0.0, 0.0])}, collections.deque([tf.Variable(1)])]
        self.generators = [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]
        self.others = np.random.Generator(np.random.Philox(1))
        self.mean, self.seeds = keras.metrics.Mean(), {"seeds": keras.random.SeedGenerator(1)}
        self.layer, self.counts = keras.layers.Dense(2), np.zeros(2, ">i4")
        self.layer.build((1, 3))

    def train(self):
        self.best = tf.constant([1.0, 2.0])
        for variable in (self.shadow[0], self.shadow[1]["w"], self.shadow[2][0], self.layer.bias, self.kernels[0][0]):
            variable.assign(variable + keras.ops.ones_like(variable))
        self.mean.update_state(5.0)
        self.counts += 1
        self.draw()

    def held(self):
        first, second, third = self.shadow
        return [first, second["w"], third[0], *self.generators, self.others, self.mean, self.layer, self.kernels[0]]

    def draw(self):
        drawn = [each.random() if hasattr(each, "random") else each.rand() for each in [*self.generators, self.others]]
        return [*drawn, np.asarray(keras.random.normal((1,), seed=self.seeds["seeds"])).tolist()]


def test_variables_metrics_and_generators_of_callbacks_are_restored_in_place():
    model = checks.build(None)
    kernels = model.trainable_variables
    callback, again = HoldsInPlace(kernels), HoldsInPlace(kernels)
    states, restored = (states_of(each, model) for each in (callback, again))
    held = again.held()
    before = kernels[0].numpy()
    callback.train()
    captured = states.changes()
    assert sorted(captured[next(iter(captured))]) == [
        *("best", "counts", "generators", "layer", "mean", "others", "seeds", "shadow"),
    ]
    restored.put_back(as_saved(captured))
    assert again.draw() == callback.draw()
    assert float(again.mean.result()) == 5
    assert again.counts.tolist() == [1, 1]
    np.testing.assert_array_equal(again.layer.get_weights()[1], [1, 1])
    assert isinstance(again.best, tf.Tensor) and again.best.numpy().tolist() == [1, 2]
    assert again.shadow[0].numpy() == 1 and again.shadow[1]["w"].numpy().tolist() == [1, 1]
    assert again.shadow[2][0].numpy() == 2
    assert all(mine is other for mine, other in zip(again.held(), held, strict=True))
    np.testing.assert_array_equal(kernels[0].numpy(), before + 1)
    assert again.kernels[1]["both"][0] is kernels[0]


def test_a_missing_object_to_restore_in_place_gets_a_warning(caplog):
    callback, again = HoldsInPlace([]), HoldsInPlace([])
    states, restored = states_of(callback), states_of(again)
    callback.mean.update_state(5.0)
    again.mean = None
    for _ in range(2):
        restored.put_back(as_saved(states.changes()))
    (told,) = told_of("HoldsInPlace", caplog)
    assert "HoldsInPlace starts over with its attribute 'mean'" in told


@pytest.mark.parametrize(
    "value",
    [np.longdouble(1), np.zeros(2, np.clongdouble), np.ma.masked_array([1.0], [True]), np.array(["a"]), object()],
    ids=lambda value: type(value).__name__,
)
def test_values_that_could_not_be_restored_are_not_saved(value):
    with pytest.raises(TypeError, match="cannot be saved"):
        serialization.encode([value], [])


class InPlace(keras.callbacks.Callback):
    """Changes small and large arrays in place, and leaves other arrays unchanged."""

    def __init__(self):
        super().__init__()
        self.seen, self.many, self.large = np.zeros(10), [np.zeros(2), {"a": np.zeros(3)}], np.zeros(1 << 18)
        self.same, self.large_same, self.scalar = np.full(2, np.nan), np.ones(1 << 18), np.float32(1)

    def train(self):
        for array in (self.seen, self.many[0], self.many[1]["a"], self.large):
            array[-1] += 1


def test_only_changed_arrays_of_a_callback_are_saved():
    callback, again = InPlace(), InPlace()
    states, restored = states_of(callback), states_of(again)
    at_start = states.changes()
    callback.train()
    captured = states.changes()
    (of_one,) = captured.values()
    assert sorted(of_one) == ["large", "many", "seen"]
    for _ in range(2):
        again.train()
        restored.put_back(captured)
        for name in vars(callback):
            np.testing.assert_equal(getattr(again, name), getattr(callback, name))
    restored.put_back(at_start)
    assert again.seen[-1] == again.many[1]["a"][-1] == 0


def test_callbacks_without_variables_do_not_search_the_model(monkeypatch):
    def fail(model):
        raise AssertionError

    monkeypatch.setattr(variable_states, "slots_of", fail)
    for callback in (InPlace(), Collects(), keras.callbacks.History()):
        states = states_of(callback)
        states.put_back(as_saved(states.changes()))


class Dial(StateProvider):
    """A kind of state that is not registered."""

    name, position = "dial", 0

    def capture(self):
        return CapturedState(own={"position": np.array([Dial.position])}, plain=["turned"])

    def restore(self, saved):
        assert saved.plain == ["turned"]
        Dial.position = int(saved.own.arrays["position"][0])


def test_a_kind_of_state_is_one_class_and_one_registration(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "PROVIDERS", (*snapshot.PROVIDERS, Dial))
    Dial.position = 7
    broken_off(str(tmp_path / "backup"), 3)
    Dial.position = 0
    fit_on(str(tmp_path / "backup"))
    assert Dial.position == 7


def test_random_states_that_reading_has_not_changed_are_recognized():
    for draw, undrawn in (
        (lambda: None, {"python", "numpy"}),
        (lambda: random.shuffle(list(range(6))), {"python", "numpy"}),  # a single draw, as Keras does
        (lambda: random.random(), {"numpy"}),
        (lambda: np.random.normal(), {"python"}),
    ):
        begun = random_states.capture()
        draw()
        assert random_states.unmoved(begun, 6) == undrawn
        drawn = random.getstate()
        random_states.restore(begun, undrawn)
        assert random_states.unmoved(begun, None) == undrawn
        assert "python" in undrawn or random.getstate() == drawn


def strategy_of_workers(workers, own=0):
    spec = tf.train.ClusterSpec({"chief": ["a:1"], "worker": [f"b{i}:1" for i in range(workers - 1)]})
    extended = types.SimpleNamespace(_num_workers=workers, _id_in_cluster=own, _cluster_spec=spec)
    return types.SimpleNamespace(
        extended=extended, fault_tolerance=tfdist.FaultTolerance(heartbeat_timeout_seconds=0.1)
    )


class Service:
    """A coordination service in which worker 2 publishes nothing, and peer checks fail after `answers` calls."""

    def __init__(self, answers=3, words=None):
        self.said, self.asked, self.answers, self.words = {}, [], answers, words or {}

    def context(self):
        return self

    def set_config_key_value(self, key, value):
        self.said[key] = value

    def get_config_key_value(self, key, milliseconds):
        if key.endswith("/2") and not self.words:
            assert milliseconds <= 5000
            raise tf.errors.DeadlineExceededError(None, None, "GetKeyValue() timed out")
        return json.dumps(self.words.get(key[-1]))

    def check_collective_ops_peer_health(self, task, milliseconds):
        self.asked.append(task)
        if len(self.asked) > self.answers:
            raise tf.errors.UnavailableError(None, None, "Connection refused")


def test_the_chief_does_not_wait_for_a_lost_worker(monkeypatch):
    service = Service()
    monkeypatch.setattr(coordination_store, "tf_internals", types.SimpleNamespace(context=service))
    monkeypatch.setattr(peer_probe, "tf_internals", types.SimpleNamespace(context=service))
    with pytest.raises(BackupError, match=r"Worker 0 on .* of worker 2 .* has not answered .*Connection refused"):
        agreement.ChiefDecision(strategy_of_workers(3), 600).settle("fit", None, any)
    assert set(service.asked) == {"/job:worker/replica:0/task:1"}
    decided = next(value for key, value in service.said.items() if key.endswith("/decided/0"))
    assert "has not answered" in json.loads(decided)["error"], "the others hear of it"


def test_the_watchdog_knows_that_the_training_thread_waits_for_an_agreement(monkeypatch):
    monkeypatch.setattr(coordination_store, "tf_internals", types.SimpleNamespace(context=Service(words={"1": 0})))
    settled = []
    of_worker = agreement.ChiefDecision(strategy_of_workers(2), 600)
    for topic in ("fit", "save"):
        with contextlib.suppress(TypeError):  # The service does not return the decision.
            of_worker.settle(topic, 0, lambda said: settled.append(list(beside_steps.sections)))
    assert settled == [[AGREEING], []] and beside_steps.sections == []


def test_a_worker_without_the_backup_callback_is_named_after_the_timeout(monkeypatch):
    service = Service(answers=float("inf"))
    monkeypatch.setattr(coordination_store, "tf_internals", types.SimpleNamespace(context=service))
    monkeypatch.setattr(peer_probe, "tf_internals", types.SimpleNamespace(context=service))
    strategy = strategy_of_workers(3)
    strategy.fault_tolerance = tfdist.FaultTolerance(start_timeout_seconds=0.05)
    with pytest.raises(
        BackupError, match=r"waited up to 0\.05 s for worker 2 .* on every worker.* `on_train_begin` of other callbacks"
    ):
        agreement.ChiefDecision(strategy, 600).begin({"keep": "2"})


def test_workers_with_different_arguments_are_named_with_their_values(monkeypatch):
    words = {"1": {"save_freq": "2", "keep": "2"}, "2": {"save_freq": "3", "keep": "2"}}
    service = Service(words=words)
    monkeypatch.setattr(coordination_store, "tf_internals", types.SimpleNamespace(context=service))
    with pytest.raises(BackupError, match="save_freq=2 on worker 0 and save_freq=3 on worker 2"):
        agreement.ChiefDecision(strategy_of_workers(3), 600).begin(words["1"])


def test_a_fit_of_the_chief_alone_does_not_shift_later_agreements(monkeypatch):
    service = Service()
    monkeypatch.setattr(coordination_store, "tf_internals", types.SimpleNamespace(context=service))
    topics = []
    for alone in (0, 1):
        for _ in range(alone):
            agreement.ChiefDecision(strategy_of_workers(1), 600).settle("fit", None, any)
        service.said.clear()
        with pytest.raises(TypeError):  # the chief has published no decision
            agreement.ChiefDecision(strategy_of_workers(2, own=1), 600).settle("fit", None, any)
        topics += [int(key.split("/")[2]) for key in service.said]
    assert topics == [topics[0], topics[0] + 1]


class Clocked(Service):
    """A coordination service with its own clock; keys appear at given seconds, selected by the ends of the keys."""

    def __init__(self, comes):
        super().__init__(answers=float("inf"))
        self.comes, self.now = comes, 0.0

    def monotonic(self):
        return self.now

    def get_config_key_value(self, key, milliseconds):
        at = next((at for end, at in self.comes.items() if key.endswith(end)), float("inf"))
        if at > self.now + milliseconds / 1000:
            self.now += milliseconds / 1000
            raise tf.errors.DeadlineExceededError(None, None, "GetKeyValue() timed out")
        self.now = max(self.now, at)
        return json.dumps({"decided": None} if "/decided" in key else {})


MEETINGS = {
    "a late worker does not extend the time of the next": (0, {"/fit/0/1": 290}, "for worker 2", 301),
    "the chief joins late and waits for others": (1, {"/waits/0": 250, "/decided/0": 545}, None, 545),
    "the chief is missing": (1, {}, "for worker 0", 312),
    "the chief falls silent": (1, {"/waits/0": 250}, "for worker 0", 622),
    "a program has ended": (0, {"/fit/0/1": 0, "done/2": 7}, "the program of worker 2 has ended while worker 0 ", 15),
    "a program ended after its message": (
        *(0, {"/fit/0/1": 7, "/fit/0/2": 12.2, "done/2": 6, "/decided/0": 12.3}),
        *(None, 12.3),
    ),
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_missing_worker_is_named_at_the_deadline(meeting, monkeypatch):
    own, comes, named, latest = MEETINGS[meeting]
    service = Clocked(comes)
    for module in (coordination_store, peer_probe):
        monkeypatch.setattr(module, "tf_internals", types.SimpleNamespace(context=service))
    monkeypatch.setattr(agreement, "time", service)
    of_worker = agreement.ChiefDecision(strategy_of_workers(3, own), 600)
    with pytest.raises(BackupError, match=named) if named else contextlib.nullcontext():
        of_worker.begin({})
    assert service.now <= latest


def sharding_at(step, seed=0, epoch=3, *, followed=True):
    made = tfdist.data.BalancedSharding((np.arange(40),), 4, seed=seed)
    if followed:
        made.attach(object())
    position = json.loads(made.serialize()) | {"epoch": epoch, "step": step}
    made.deserialize(json.dumps(position))
    return made


def captured(begins, own, ends):
    """Returns the positions in a commit, for shardings at `begins` when the epoch began and at `ends` now."""
    positions = ShardingPositions(begins, own)
    positions.begin_epoch()
    for sharding, end in zip(begins, ends, strict=True):
        sharding.deserialize(end.serialize())
    return positions.capture()


def test_positions_are_restored_to_the_right_shardings():
    train = sharding_at(0)
    saved = captured([train, sharding_at(0, seed=1)], train, [sharding_at(6), sharding_at(0, seed=1)])
    cases = {
        "fewer": (lambda own: [own], 0),
        "more": (lambda own: [sharding_at(0, seed=2), own, sharding_at(0, seed=1)], 0),
        "of a `fit` that was broken off": (lambda own: [sharding_at(0), own], 0),
    }
    for case, (shardings, step) in cases.items():
        own = sharding_at(step)
        positions = ShardingPositions(shardings(own), own)
        positions.restore(saved)
        assert own.position == (3, 6), case
        positions.begin_epoch(saved)
        assert positions.continues(saved)
        assert positions.capture()["at_epoch"][shardings(own).index(own)] == saved["at_epoch"][0], case


def test_an_unfollowed_sharding_reads_the_batches_of_its_epoch_again():
    train = sharding_at(0, followed=False)
    saved = captured([train], train, [sharding_at(0, epoch=4)])  # read ahead to its end
    own = sharding_at(0, epoch=0, followed=False)
    positions = ShardingPositions([], own)
    positions.restore(saved)
    assert own.position == (3, 0) and not positions.continues(saved)


def test_arrays_are_read_again_even_if_a_sharding_has_moved():
    probe = sharding_at(0)
    saved = captured([probe], None, [sharding_at(6)])
    assert ShardingPositions([probe]).continues(saved), "a loop of the user's"
    assert not ShardingPositions([probe], is_other=True).continues(saved)


def test_a_position_in_other_batches_is_refused():
    train, other = sharding_at(0), sharding_at(0, seed=1)
    with pytest.raises(PositionError, match="seed was 0, is 1"):
        ShardingPositions([other], other).restore(captured([train], train, [sharding_at(6)]))
    with pytest.raises(PositionError, match="seed was 0, is 1"):  # a user's own loop, with unknown input
        ShardingPositions([other]).restore(captured([train], None, [sharding_at(7)]))
    assert not ShardingPositions([]).continues(captured([train], train, [sharding_at(8)])), "arrays now"


@pytest.mark.exhaustive
def test_another_number_of_replicas_continues_with_the_next_global_batch(pools, tmp_path):
    epochs, history, iterations = pools("1x2").run(checks.resumed_with_fewer, str(tmp_path / "backup"))[0]
    assert epochs == list(range(checks.EPOCHS))
    assert iterations == checks.EPOCHS * checks.STEPS
    assert all(len(values) == checks.EPOCHS and np.all(np.isfinite(values)) for values in history.values())


@pytest.mark.parametrize(
    ("note", "expected"), [("3\n/b", "7\n/b"), ("9\n/b", "9\n/b"), ("3\n/a", "3\n/a"), (None, None)]
)
def test_an_unreported_commit_is_reported_when_it_is_restored(note, expected, tmp_path, monkeypatch):
    """Otherwise a run that is killed right after each commit would stop. The commit may belong to an earlier run."""
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    if note is not None:
        (tmp_path / "committed").write_text(note)
    commit_writer.tell_of_untold("/b", 7)
    assert [path.read_text() for path in tmp_path.iterdir()] == [expected][: expected is not None]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"model_sharding": "optimizer"}, {}, marks=pytest.mark.exhaustive),
        ({}, {"model_sharding": "optimizer"}),
        ({"model_sharding": "optimizer"}, {"devices": ["CPU:0"]}),
        pytest.param({"model_sharding": "parameters"}, {"model_sharding": "parameters"}, marks=pytest.mark.exhaustive),
        ({"model_sharding": "parameters"}, {"devices": ["CPU:0"]}),
        pytest.param({}, {"model_sharding": "parameters"}, marks=pytest.mark.exhaustive),
    ],
)
def test_sharded_state_is_restored_with_other_parts(before, after, pools, tmp_path):
    resumed, unbroken = pools("1x2").run(checks.resumed_with_other_parts, str(tmp_path / "backup"), before, after)[0]

    for own, other in zip(resumed, unbroken, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize("after", [{"devices": ["CPU:0"]}, {}], ids=["one replica", "two replicas"])
def test_other_replicas_start_from_synchronized_weights(kind, after, pools, tmp_path):
    synchronization = {"LocalSGD": tfdist.LocalSGD(every=3), "DiLoCo": tfdist.DiLoCo(every=3)}[kind]
    check = checks.resumed_without_local_steps
    before, resumed = pools("1x2").run(check, str(tmp_path / "backup"), synchronization, after)[0]

    # The commit is of step 4; the last synchronization was after step 3.
    for copies, of_sync, of_commit in zip(resumed[4], before[3], before[4], strict=True):
        np.testing.assert_array_equal(of_sync[0], of_sync[1])
        assert np.any(of_commit[0] != of_commit[1])
        expected = of_sync[0] if kind == "DiLoCo" else np.mean(of_commit, axis=0, dtype="float32")
        for copy in copies:
            np.testing.assert_allclose(copy, expected, rtol=1e-6, atol=1e-7)


OTHER_SYNCHRONIZATIONS = [
    pytest.param(tfdist.DiLoCo(every=3, fragments=2), id="fragments"),
    pytest.param(
        tfdist.DiLoCo(every=3, outer_optimizer=keras.optimizers.Adam(0.1)),
        id="outer optimizer",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize("after", OTHER_SYNCHRONIZATIONS)
def test_another_synchronization_starts_from_synchronized_weights(after, pools, tmp_path):
    arguments = str(tmp_path / "backup"), tfdist.DiLoCo(every=3), {"synchronization": after}
    before, resumed = pools("1x2").run(checks.resumed_without_local_steps, *arguments)[0]

    for copies, of_sync in zip(resumed[4], before[3], strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, of_sync[0])


IN_GROUPS = {"model_sharding": "optimizer", "shard_group_size": 2}
DIVIDED_IN_GROUPS = {"model_sharding": "parameters", "shard_group_size": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(IN_GROUPS, {"model_sharding": "optimizer"}, marks=pytest.mark.exhaustive),
        (DIVIDED_IN_GROUPS, {"devices": ["CPU:0"]}),
        pytest.param({"model_sharding": "optimizer"}, IN_GROUPS, marks=pytest.mark.exhaustive),
        pytest.param(DIVIDED_IN_GROUPS, DIVIDED_IN_GROUPS, marks=pytest.mark.exhaustive),
        pytest.param({}, DIVIDED_IN_GROUPS, marks=pytest.mark.exhaustive),
    ],
)
def test_state_of_groups_is_restored_with_other_parts(before, after, pools, tmp_path):
    resumed, unbroken = pools("1x4").run(checks.resumed_with_other_parts, str(tmp_path / "backup"), before, after)[0]

    for own, other in zip(resumed, unbroken, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_the_key_of_a_metric_is_found_without_a_sum_over_workers():
    class Summed:
        def __getattr__(self, name):
            raise AssertionError(f"looking for {name} sums the metric over all workers")

    slot = variable_states.Slot("metric/0", "loss/total", types.SimpleNamespace(value=Summed()), own=True)
    assert slot.own_key == "metric/0"

"""`tfdist plan`: predicted steps by the rules of an all-reduce, the calibration, and the command."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys

import pytest

from recorded_runs import write_run, write_times
from tfdist.events.time_record import BEGINNING
from tfdist.launch import cli
from tfdist.plan import plan_command
from tfdist.plan.bucket_traffic import traffic_of
from tfdist.plan.exchange_costs import DEFAULT_COSTS, NONE, ExchangeCosts, costs_of_bench
from tfdist.plan.job_plan import Job, plan_job
from tfdist.plan.plan_table import print_plan
from tfdist.plan.planned_buckets import Gradient, PlannedBucket, fill_planned_buckets
from tfdist.plan.run_compute import compute_seconds_of
from tfdist.plan.step_prediction import PlannedStep, predict_step

FREE = ExchangeCosts(0.0, 0.0, {NONE: 0.0, "int8": 0.0}, "nothing costs time but the link")
CALIBRATION = "bench.json"
TENSORS = [Gradient(4e6, 4e6)] * 10
MODEL = """
import keras
def make_model():
    layers = [keras.layers.Dense(1000, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((1000,)), *layers])
    model.compile("adam", "mse")
    return model
def number():
    return 1
"""


def step(compute=0.1, gradients=TENSORS, codec=NONE, forward_share=0.0):
    return PlannedStep(compute, gradients, codec, forward_share)


@pytest.mark.unit
def test_one_replica_only_computes():
    predicted = predict_step(step(), 1, 1e9, DEFAULT_COSTS)
    assert (predicted.seconds, predicted.efficiency, predicted.sent_bytes, predicted.messages) == (0.1, 1, 0, 0)


@pytest.mark.unit
@pytest.mark.parametrize("replicas", [2, 3, 16, 1024])
def test_a_slow_link_takes_the_time_of_its_bytes_after_the_first_gradients(replicas):
    predicted = predict_step(step(), replicas, 1e8, FREE)
    sent = 2 * (replicas - 1) / replicas * 40e6
    assert predicted.sent_bytes == pytest.approx(sent)
    assert predicted.seconds == pytest.approx(0.01 + sent * 8 / 1e8)


@pytest.mark.unit
def test_a_fast_link_hides_all_but_the_last_bucket():
    predicted = predict_step(step(), 2, 1e12, FREE)
    assert 0.1 < predicted.seconds < 0.1001
    assert predicted.efficiency > 0.999


@pytest.mark.unit
def test_gradients_after_the_forward_pass_leave_less_time_to_hide_the_exchange():
    seconds = [predict_step(step(forward_share=share), 2, 1e9, FREE).seconds for share in (0.0, 0.3, 0.9)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


# Numbers of rows of 256 columns, in the order of the layers.
MODELS = [[4000] * 10, [100, 40000, 3, 3, 5000, 700, 1], [10, 20, 30], [60000], [4096, 4095, 1, 4096]]


@pytest.mark.parametrize("rows", MODELS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_planned_buckets_are_those_of_the_strategies(rows, replicas):
    import tensorflow as tf

    from tfdist.strategies.collectives import buckets, power_sgd_group

    tensors = [tf.TensorSpec([count, 256], tf.float32) for count in rows]
    gradients = [Gradient(1024.0 * count, 256.0 * count) for count in rows]
    part = buckets.part_bytes(replicas)
    limits = {NONE: buckets.bucket_bytes(tensors), "int8": buckets.BUCKET_BYTES}
    for codec, limit in limits.items():
        real = buckets.fill_buckets(tensors, limit, 256, part_bytes=part)
        planned = fill_planned_buckets(gradients, codec, replicas)
        sizes = sorted(sum(segment.stop - segment.start for segment in bucket) for bucket in real)
        assert [each.float_bytes / 4 for each in sorted(planned, key=lambda each: each.float_bytes)] == pytest.approx(
            sizes, rel=0.01
        )
        assert planned[-1].made == pytest.approx(1)
    groups = {tuple(segment.tensor for segment in bucket) for bucket in buckets.fill_buckets(tensors, 16 << 20)}
    assert power_sgd_group._MATRICES_BYTES == 16 << 20
    assert len(fill_planned_buckets(gradients, "powersgd(4)", replicas)) == len(groups)


@pytest.mark.parametrize("size", [400.0, 4e6])
@pytest.mark.parametrize(("replicas", "group_size"), [(2, None), (3, None), (16, None), (4, 2), (16, 4), (32, 8)])
def test_planned_traffic_is_that_of_the_strategies(size, replicas, group_size):
    from types import SimpleNamespace

    from tfdist.strategies.collectives.codec_group import sent_words
    from tfdist.strategies.collectives.transport import is_sent_whole
    from tfdist.strategies.collectives.two_level_transport import TwoLevelTransport
    from tfdist.strategies.compression import Int8, TopK

    bucket = PlannedBucket(1.0, size, size)
    if group_size is None:
        relay = 1.0
        real = size * (replicas - 1 if is_sent_whole(size, replicas) else 2 * (replicas - 1) / replicas)
    else:
        ranks = [SimpleNamespace(ranks=each) for each in (group_size, replicas // group_size)]
        levels = TwoLevelTransport(*ranks)
        relay, real = levels.relay, levels.sum_bytes(size)
    assert traffic_of(bucket, NONE, replicas, group_size).sent_bytes == pytest.approx(real)
    elements = 256 * 32 * 30
    for codec in (Int8(), TopK()):
        encoded = PlannedBucket(1.0, 4.0 * elements, 4.0 * codec.words(elements))
        planned = traffic_of(encoded, codec.name, replicas, group_size)
        assert planned.sent_bytes == pytest.approx(4 * sent_words(codec, elements, replicas, relay), rel=0.01)


@pytest.mark.unit
def test_groups_need_fewer_messages_and_more_rounds():
    bucket = PlannedBucket(1.0, 4e6, 4e6)
    flat, grouped = (traffic_of(bucket, NONE, 64, size) for size in (None, 8))
    assert (flat.messages, grouped.messages) == (2 * 63, 4 * 7)
    assert (flat.rounds, grouped.rounds) == (2, 4)
    assert flat.sent_bytes == pytest.approx(grouped.sent_bytes)


@pytest.mark.unit
def test_a_large_gradient_travels_in_parts_once_it_exists():
    whole = predict_step(step(gradients=[Gradient(40e6, 40e6)]), 2, 1e9, FREE)
    assert whole.seconds == pytest.approx(0.1 + 0.32)
    assert whole.messages == 3


@pytest.mark.unit
def test_coding_delays_the_computation():
    costs = ExchangeCosts(0.0, 0.0, {"int8": 1e-9}, "")
    predicted = predict_step(step(gradients=[Gradient(4e6, 1e6)] * 10, codec="int8"), 2, 1e12, costs)
    assert predicted.seconds == pytest.approx(0.1 + 40e6 * 1e-9, rel=1e-3)


@pytest.mark.unit
def test_coding_on_another_processor_adds_the_time_of_the_last_bucket():
    costs = ExchangeCosts(0.0, 0.0, {"int8": 1e-9}, "")
    planned = PlannedStep(0.1, [Gradient(4e6, 1e6)] * 10, "int8", 0.0, codes_elsewhere=True)
    assert predict_step(planned, 2, 1e12, costs).seconds == pytest.approx(0.1 + 4e6 * 1e-9, rel=1e-3)


@pytest.mark.unit
@pytest.mark.parametrize("link", [1e8, 1e9, 1e10, 1e11])
def test_efficiency_falls_with_the_number_of_replicas_and_stays_below_the_bounds(link):
    curve = [predict_step(step(), 1 << power, link, DEFAULT_COSTS) for power in range(13)]
    assert [each.efficiency for each in curve] == sorted((each.efficiency for each in curve), reverse=True)
    assert all(each.seconds >= max(0.1, each.sent_bytes * 8 / link) for each in curve)


@pytest.mark.unit
@pytest.mark.parametrize(("replicas", "measured"), [(2, 0.361), (4, 0.556)])
def test_predictions_are_near_the_steps_that_were_measured(replicas, measured):
    """An emulated accelerator of 100 ms and 10 gradients, links of 958 Mbit/s."""
    assert predict_step(step(), replicas, 958e6, DEFAULT_COSTS).seconds == pytest.approx(measured, rel=0.15)


@pytest.mark.unit
@pytest.mark.parametrize(("link", "recommended"), [(1e12, NONE), (1e9, "int8")])
def test_the_most_exact_of_the_fastest_codecs_is_recommended(link, recommended):
    gradients = {NONE: TENSORS, "int8": [Gradient(4e6, 1e6)] * 10, "sign": [Gradient(4e6, 0.99e6)] * 10}
    plan = plan_job(Job(8, link, 0.1, 1 / 3, gradients), DEFAULT_COSTS)
    assert plan.recommended.codec == recommended
    assert [pair[0].replicas for pair in plan.curve] == [1 << power for power in range(13)]


@pytest.mark.unit
@pytest.mark.parametrize(("link", "replicas", "are_faster"), [(1e10, 256, True), (1e9, 16, False)])
def test_groups_are_recommended_where_they_make_a_step_shorter(link, replicas, are_faster):
    gradients = {NONE: TENSORS, "int8": [Gradient(4e6, 1e6)] * 10}
    groups = {16: 4, 256: 16}.get
    plan = plan_job(Job(replicas, link, 0.1, 1 / 3, gradients), DEFAULT_COSTS, groups)
    of_groups = plan_job(Job(replicas, link, 0.1, 1 / 3, gradients, groups), DEFAULT_COSTS)
    assert of_groups.in_groups is None
    assert plan.in_groups == (of_groups.recommended if are_faster else None)
    assert (of_groups.recommended.seconds < plan.recommended.seconds / 1.02) == are_faster


@pytest.mark.unit
@pytest.mark.parametrize(("replicas", "size"), [(256, 16), (257, None)])
def test_a_prime_number_of_replicas_has_no_groups_to_recommend(replicas, size):
    groups = functools.partial(plan_command.size_of_groups, "auto")
    plan = plan_job(Job(replicas, 1e10, 0.1, 1 / 3, {NONE: TENSORS}), DEFAULT_COSTS, groups)
    assert groups(replicas) == size
    assert (plan.in_groups is None) == (size is None)


@pytest.mark.unit
def test_the_advice_on_groups_names_a_time_only_with_measured_costs(capsys):
    job, groups = Job(256, 1e10, 0.1, 1 / 3, {NONE: TENSORS}), {256: 16}.get
    for costs, times in (DEFAULT_COSTS, 1), (dataclasses.replace(DEFAULT_COSTS, source="measured"), 2):
        print_plan(plan_job(job, costs, groups), job, costs)
        out = " ".join(capsys.readouterr().out.split())
        assert "exchange_group_size='auto'" in out
        assert out.count("Predicted step:") == times


def bench_result(path, rows):
    seconds = [
        {"compression": name, "bytes": size, "skipped": None, "seconds": {"median": time}} for name, size, time in rows
    ]
    skipped = {"compression": "sign", "bytes": 4, "skipped": "too small"}
    path.write_text(json.dumps({"workers": 2, "machine": {"cpu": "A"}, "rows": [*seconds, skipped]}))
    return path


@pytest.mark.unit
def test_a_calibration_gives_latency_and_time_of_a_byte(tmp_path):
    rows = [(NONE, 1000, 0.001), (NONE, 1001000, 0.002), ("int8", 1000, 0.002), ("int8", 1001000, 0.005)]
    costs = costs_of_bench(bench_result(tmp_path / "bench.json", rows))
    assert costs.latency_seconds == pytest.approx(0.001, rel=0.01)
    assert costs.seconds_per_byte(NONE) == pytest.approx(1e-9)
    assert costs.seconds_per_byte("int8") == pytest.approx(3e-9)
    assert costs.seconds_per_byte("sign") is None
    assert costs.source == "`tfdist bench` of 2 workers on A, 0.2 ms for a message"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no result of `tfdist bench"),
        ("[]", "no result of `tfdist bench"),
        ('{"rows": [{}]}', "no result of `tfdist bench"),
        ('{"rows": []}', "at least two sizes"),
        (
            '{"rows": [{"compression": "int8", "bytes": 4, "skipped": null, "seconds": {"median": 1}}]}',
            "fewer for int8",
        ),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text, message):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        costs_of_bench(tmp_path / "bench.json")


@pytest.mark.unit
def test_a_run_tells_the_time_that_its_steps_compute(tmp_path):
    write_run(tmp_path)  # Its newest attempt computes 3 s in 30 steps.
    assert compute_seconds_of(tmp_path) == pytest.approx(0.1)
    for worker in range(2):
        write_times(tmp_path, 1, worker, 13, 19, (10, 10), start_up=3, compute=9)  # Only 9 steps.
    write_times(tmp_path, 0, 2, 0, 20, (BEGINNING, 0), start_up=4, compute=20)
    assert compute_seconds_of(tmp_path) == pytest.approx(0.1)  # The median of 0.1, 0.1 and 1 s, of the attempt before.


@pytest.mark.unit
def test_a_run_without_enough_steps_is_refused(tmp_path):
    write_times(tmp_path, 0, 0, 0, 9, (BEGINNING, 0), start_up=4, compute=2)
    with pytest.raises(ValueError, match=r"trained 10 steps .* give the time .* to --compute-ms"):
        compute_seconds_of(tmp_path)


def plan(directory, *arguments):
    (directory / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "tfdist", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)


def test_the_command_prints_and_writes_its_predictions(tmp_path):
    options = ["-n", "256", "--link", "1gbit", "--compute-ms", "20", "--compression", "int8,powersgd(4)"]
    done = plan(tmp_path, "model.py:make_model", *options, "--memory", "1GB", "--json", "plan.json")

    assert done.returncode == 0, done.stderr
    assert "Recommended: compression='powersgd(4)'" in done.stdout
    assert "4096" in done.stdout
    assert "The model fits into 1 GB without sharding." in done.stdout
    written = json.loads((tmp_path / "plan.json").read_text())
    by_codec = {each["codec"]: each for each in written["predictions"]}
    assert by_codec[NONE]["sent_bytes"] == pytest.approx(12e6 * 2 * 255 / 256)
    assert 3.9 < by_codec[NONE]["sent_bytes"] / by_codec["int8"]["sent_bytes"] < 4
    assert by_codec["powersgd(4)"]["sent_bytes"] == pytest.approx(3 * 4 * 4 * 2000 * 2 * 255 / 256)
    assert written["recommended"] == "powersgd(4)"


def test_the_command_plans_exchanges_in_two_levels(tmp_path):
    options = ["-n", "64", "--link", "10gbit", "--compute-ms", "20", "--compression", "int8"]
    done = plan(tmp_path, "model.py:make_model", *options, "--exchange-group-size", "auto", "--json", "plan.json")

    assert done.returncode == 0, done.stderr
    assert "in two levels, 64 of them in groups of 8" in " ".join(done.stdout.split())
    by_codec = {each["codec"]: each for each in json.loads((tmp_path / "plan.json").read_text())["predictions"]}
    assert by_codec[NONE]["messages"] == 3 * 4 * 7

    done = plan(tmp_path, "model.py:make_model", *options, "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "Workers on CPUs are probably faster with exchange_group_size='auto'" in " ".join(done.stdout.split())
    in_groups = json.loads((tmp_path / "plan.json").read_text())["in_groups"]
    assert in_groups == by_codec[in_groups["codec"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.py:make_model", "--compression", "int9"], "as in powersgd(4)), got 'int9'"),
        (["model.py:make_model", "--compression", "auto"], "--compression lists codecs to compare"),
        (
            ["model.py:make_model", "--compression", "powersgd(4)", "--calibration", CALIBRATION],
            "`tfdist bench --workers 2 --compression none,powersgd --json FILE`",
        ),
        (["model.py:number"], "must return a built model"),
        (["model.py:missing"], "no function"),
        (["model.py:make_model", "--calibration", "none.json"], "none.json"),
        (["model.py:make_model", "--compute-ms", "0"], "--compute-ms"),
        (["model.py:make_model", "--exchange-group-size", "3"], "must divide the number of workers"),
        (["model.py:make_model", "--run", "."], "no attempt-0"),
        (["model.py:make_model", "--json", "missing/plan.json"], "--json missing/plan.json must be a file that can be"),
    ],
)
def test_bad_input_is_an_error_with_the_value(tmp_path, arguments, message, monkeypatch, caplog):
    (tmp_path / "model.py").write_text(MODEL)
    bench_result(tmp_path / CALIBRATION, [(NONE, 1000, 0.001), (NONE, 2000, 0.002)])
    monkeypatch.chdir(tmp_path)
    compute = [] if "--run" in arguments else ["--compute-ms", "20"]
    assert cli.main(["plan", "-n", "4", "--link", "1gbit", *compute, *arguments]) == 1
    assert message in caplog.text
    assert sorted(path.name for path in pathlib.Path(tmp_path).iterdir() if path.name != "__pycache__") == [
        CALIBRATION,
        "model.py",
    ]


@pytest.mark.unit
@pytest.mark.parametrize("command", ["plan", "bench"])
def test_the_time_of_a_step_is_a_number_of_milliseconds(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--compute-ms", "some"])
    assert "needs a number of milliseconds of at least 0, got some" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_measurement_of_this_machine_calibrates_a_plan(tmp_path):
    options = ["--workers", "2", "--sizes", "1KiB,1MiB,4MiB", "--compression", "none,int8", "--seconds", "0.2"]
    command = [sys.executable, "-m", "tfdist", "bench", *options, "--json", str(tmp_path / "bench.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)

    done = plan(
        tmp_path,
        *["model.py:make_model", "-n", "16", "--link", "1gbit", "--compute-ms", "20"],
        *["--compression", "int8", "--calibration", "bench.json"],
    )
    assert done.returncode == 0, done.stderr
    assert "`tfdist bench` of 2 workers" in done.stdout

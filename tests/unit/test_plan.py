"""The plan: every number the engine uses, from configuration, model and machine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from kvist.config import EngineConfig
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.plan import (
    DEMOTED_BYTES_PER_STEP,
    ENCODED_PRODUCTS_PER_STEP,
    KV_MEMORY_FRACTION,
    EnginePlan,
    Hardware,
    MemoryEstimate,
    WeightFormat,
    detect_hardware,
    kv_spec_of,
    memory_estimate,
    read_spec,
    resolve,
)
from kvist.precision import PRESETS, KVPrecision
from kvist.spec import GIB, LayerSpec, ModelSpec, RopeSpec

MIB = 1024**2


def make_spec(**changes) -> ModelSpec:
    """Return a small llama-like model: 4 layers, 2 KV heads of 16, context 1,024."""
    values = {
        "architecture": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_context_len": 1024,
        "ropes": (RopeSpec(base=10000.0, dim=16),),
        "has_tied_embeddings": True,
        "attention_scale": 0.25,
    }
    values.update(changes)
    values.setdefault("layers", (LayerSpec(),) * values["num_layers"])
    return ModelSpec(**values)


LLAMA_2_7B = make_spec(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
    max_context_len=4096,
    has_tied_embeddings=False,
)
BLOCK_BYTES = 4 * 2 * 2 * 16 * 2 * 64  # layers, K and V, heads, dims, bytes, tokens of make_spec()
MACHINE = Hardware(cpus=3, available_bytes=GIB)
NATIVE_MACHINE = Hardware(cpus=3, available_bytes=GIB, isa="avx2")
BARE_MACHINE = Hardware(cpus=3, available_bytes=GIB, why_no_isa="no compiler was found")


def plan_of(spec: ModelSpec | None = None, hardware: Hardware = MACHINE, **options) -> EnginePlan:
    return resolve(EngineConfig.from_options(**options), spec or make_spec(), hardware)


class TestResolve:
    def test_decides_every_field(self):
        plan = plan_of()
        assert all(getattr(plan, f.name) is not None for f in dataclasses.fields(plan))

    def test_defaults_on_a_cpu(self):
        plan = plan_of()
        assert (plan.plane, plan.weights, plan.dtype) == ("torch", "float32", "float32")
        assert (plan.codec, plan.threads) == ("raw16", 3)
        assert (plan.prefix_cache, plan.keep_kv, plan.notes) == (True, True, ())

    @pytest.mark.parametrize(
        ("option", "value", "field"),
        [
            ("dtype", "bfloat16", "dtype"),
            ("kv_cache_dtype", "float32", "codec"),
            ("kv_cache_dtype", "int8", "codec"),
            ("threads", 1, "threads"),
            ("max_context", 512, "max_context_len"),
            ("block_size", 16, "block_size"),
            ("max_batch_tokens", 7, "max_batch_tokens"),
            ("max_running", 5, "max_running"),
            ("max_queue", 9, "max_queue"),
            ("reserve_tokens", 11, "reserve_tokens"),
            ("schedule", "shortest", "schedule"),
            ("max_overtakes", 3, "max_overtakes"),
            ("eviction", "lru", "eviction"),
            ("cache_ttl_s", 300.0, "cache_ttl_s"),
            ("pin_fraction", 0.25, "pin_fraction"),
            ("model", "some-model", "model"),
        ],
    )
    def test_takes_what_the_user_asked_for(self, option, value, field):
        assert getattr(plan_of(**{option: value}), field) == value

    def test_weights_are_counted_in_the_compute_precision(self):
        spec = make_spec()
        assert plan_of(spec).weight_bytes == 4 * spec.num_parameters
        assert plan_of(spec, dtype="bfloat16").weight_bytes == 2 * spec.num_parameters

    @pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
    def test_weights_in_the_native_kernels_are_counted_packed(self, kind):
        spec = make_spec(num_layers=1, intermediate_size=40, has_qkv_bias=True)
        plan = plan_of(spec, NATIVE_MACHINE, weights=kind)
        assert (plan.plane, plan.isa, plan.weights) == ("native", "avx2", kind)
        assert plan.dtype == "float32"
        # (outputs, inputs) of qkv, output, gate and up, down, logits
        matrices = ((128, 64), (64, 64), (80, 64), (64, 40), (256, 64))
        packed = {
            "bf16": sum(2 * n * k for n, k in matrices),
            "int8": sum(n * k + 4 * n for n, k in matrices),
            # 40 inputs are one group of 32 and one of 8; the logits' matrix is int8.
            "int4": sum(n * k // 2 + 4 * n * (k // 32 + (k % 32 > 0)) for n, k in matrices[:-1])
            + 256 * (64 + 4),
        }
        norms_and_biases = 3 * 64 + 128
        assert plan.weight_bytes == packed[kind] + 2 * 256 * 64 + 4 * norms_and_biases

    def test_untied_embeddings_are_packed_once_and_looked_up_in_another(self):
        spec = make_spec()
        untied = dataclasses.replace(spec, has_tied_embeddings=False)
        tied_plan = plan_of(spec, NATIVE_MACHINE)
        assert plan_of(untied, NATIVE_MACHINE).weight_bytes == tied_plan.weight_bytes

    def test_native_kernels_compute_in_int8_where_there_are_any(self):
        plan = plan_of(hardware=NATIVE_MACHINE)
        assert (plan.plane, plan.weights, plan.notes) == ("native", "int8", ())
        assert (
            "plane=native/avx2 weights=int8 weight_memory=0.00GiB weight_cache=on"
            in plan.one_line()
        )

    @pytest.mark.parametrize(
        ("machine", "options", "is_kept"),
        [
            (NATIVE_MACHINE, {}, True),
            (NATIVE_MACHINE, {"weight_cache": "off"}, False),
            (NATIVE_MACHINE, {"dtype": "float32"}, False),
            (MACHINE, {}, False),
        ],
    )
    def test_packed_weights_are_kept_unless_told_otherwise(self, machine, options, is_kept):
        assert plan_of(hardware=machine, **options).weight_cache is is_kept

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"dtype": "float32"}, "float32"),
            ({"dtype": "bfloat16"}, "bfloat16"),
            ({"kv_cache_dtype": "float32"}, "float32"),
            ({"kv_cache_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),
        ],
    )
    def test_torch_computes_what_the_native_kernels_do_not(self, options, kind):
        plan = plan_of(hardware=NATIVE_MACHINE, **options)
        assert (plan.plane, plan.isa, plan.weights, plan.dtype) == ("torch", "", kind, kind)
        assert plan.notes == ()

    def test_torch_instead_of_missing_kernels_is_said_once(self, caplog):
        plan = plan_of(hardware=BARE_MACHINE)
        assert (plan.plane, plan.weights) == ("torch", "float32")
        assert plan.notes == ("no compiler was found",)
        assert caplog.text.count("no compiler was found") == 1

    def test_portable_kernels_run_only_when_asked_for(self):
        portable = dataclasses.replace(NATIVE_MACHINE, isa="serial")
        plan = plan_of(hardware=portable)
        assert (plan.plane, plan.weights, len(plan.notes)) == ("torch", "float32", 1)
        assert plan_of(hardware=portable, weights="int8").plane == "native"

    def test_models_without_native_kernels_run_on_torch(self):
        spec = make_spec(head_dim=20, ropes=(RopeSpec(base=1e4, dim=20),))
        plan = plan_of(spec, NATIVE_MACHINE)
        assert plan.plane == "torch"
        assert "head dimensions" in plan.notes[0]
        with pytest.raises(ConfigError, match=r"--weights int8 needs .* head dimensions"):
            plan_of(spec, NATIVE_MACHINE, weights="int8")

    def test_torch_that_was_asked_for_is_no_loss(self, caplog):
        plan = plan_of(hardware=BARE_MACHINE, dtype="float32")
        assert plan.notes == ()
        assert caplog.text == ""

    @pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
    @pytest.mark.parametrize(
        ("machine", "options", "message"),
        [
            (NATIVE_MACHINE, {"dtype": "float32"}, "--dtype float32 in torch; give one of them"),
            (NATIVE_MACHINE, {"kv_cache_dtype": "float32"}, "--kv-cache-dtype float32; set it to"),
            (BARE_MACHINE, {}, "needs the native kernels: no compiler was found; leave it at"),
        ],
    )
    def test_weights_that_something_rules_out_are_refused(self, kind, machine, options, message):
        with pytest.raises(ConfigError, match=rf"--weights {kind} .*{message}"):
            plan_of(hardware=machine, weights=kind, **options)

    def test_pool_is_no_larger_than_the_running_requests_could_use(self):
        assert plan_of(max_running=3).num_blocks == 3 * (1024 // 64)

    def test_pool_takes_a_fraction_of_what_the_weights_leave(self):
        spec = make_spec()
        hardware = Hardware(cpus=1, available_bytes=4 * spec.num_parameters + 40 * BLOCK_BYTES)
        assert plan_of(spec, hardware).num_blocks == int(40 * KV_MEMORY_FRACTION)

    def test_memory_option_is_taken_literally(self):
        plan = plan_of(memory_gib=100 * BLOCK_BYTES / GIB)
        assert plan.num_blocks == 100
        assert plan.kv_bytes == 100 * BLOCK_BYTES

    def test_kv_cache_off_shares_nothing(self):
        plan = plan_of(kv_cache="off")
        assert (plan.keep_kv, plan.prefix_cache) == (False, False)

    def test_prefix_cache_off_keeps_kv(self):
        plan = plan_of(prefix_cache="off")
        assert (plan.keep_kv, plan.prefix_cache) == (True, False)

    def test_context_is_lowered_to_a_small_pool_and_said_so(self, caplog):
        plan = plan_of(memory_gib=5 * BLOCK_BYTES / GIB)
        assert plan.max_context_len == 5 * 64
        assert "lowered from 1024 to 320" in plan.one_line()
        assert "lowered from 1024 to 320" in caplog.text

    def test_shares_are_in_the_line_of_the_log(self):
        plan = plan_of(cache_share={"team-b": 0.25, "team-a": 0.5})
        assert plan.cache_shares == (("team-a", 0.5), ("team-b", 0.25))
        assert "cache_shares=team-a:0.5,team-b:0.25" in plan.one_line()
        assert (
            "eviction=default cache_shares=none cache_ttl_s=0 pin_fraction=0"
            in plan_of().one_line()
        )

    def test_no_request_counts_on_what_pins_may_hold(self):
        plan = plan_of(memory_gib=10 * BLOCK_BYTES / GIB, pin_fraction=0.5)
        assert (plan.num_blocks, plan.max_context_len) == (10, 5 * 64)

    def test_pins_may_not_leave_less_than_one_request_needs(self):
        with pytest.raises(
            ConfigError, match=r"not even one small request fits.* --pin-fraction 0.9"
        ):
            plan_of(memory_gib=10 * BLOCK_BYTES / GIB, pin_fraction=0.9)

    def test_context_asked_for_is_refused_when_the_pool_is_too_small(self):
        with pytest.raises(ConfigError, match=r"--max-context 1024 needs 16 blocks.* 5 fit.*320"):
            plan_of(memory_gib=5 * BLOCK_BYTES / GIB, max_context=1024)

    def test_context_beyond_the_model_is_refused(self):
        with pytest.raises(ConfigError, match=r"--max-context 2000 is more than the 1024"):
            plan_of(max_context=2000)

    def test_memory_that_is_not_there_is_refused(self):
        with pytest.raises(ConfigError, match=r"--memory-gib 2 needs 2,147,483,648 bytes"):
            plan_of(memory_gib=2.0)

    def test_pool_too_small_for_one_request_is_refused(self):
        with pytest.raises(ConfigError, match=r"4 blocks .* are needed, 3 fit .*--memory-gib"):
            plan_of(memory_gib=3 * BLOCK_BYTES / GIB)

    def test_machine_too_small_for_the_weights_is_refused(self):
        with pytest.raises(ConfigError, match=r"not even one small request fits.*1,000 bytes"):
            plan_of(hardware=Hardware(cpus=1, available_bytes=1000))

    def test_short_context_needs_only_its_own_blocks(self):
        assert plan_of(memory_gib=1 * BLOCK_BYTES / GIB, max_context=64).num_blocks == 1

    def test_one_line_names_every_decision(self):
        line = plan_of(model="tiny").one_line()
        assert "\n" not in line
        for part in ("model=tiny", "dtype=float32", "kv=raw16", "max_context=1024", "threads=3"):
            assert part in line

    def test_block_shape_follows_the_plan(self):
        plan = plan_of(block_size=16, kv_cache_dtype="float32")
        kv_spec = kv_spec_of(plan, make_spec())
        assert kv_spec.block_bytes * plan.num_blocks == plan.kv_bytes


class TestMemoryEstimate:
    def estimate(self, spec=LLAMA_2_7B, **changes) -> MemoryEstimate:
        values = {"context": 2048, "concurrency": 8, "block_size": 64}
        return memory_estimate(spec, **{**values, **changes})

    def test_llama_2_7b_needs_one_gib_per_request(self):
        estimate = self.estimate()
        assert estimate.request_bytes == GIB
        assert estimate.kv_bytes == 8 * GIB
        assert estimate.token_bytes == 512 * 1024
        assert estimate.num_parameters == 6_738_415_616
        narrow = WeightFormat(plane="torch", kind="bfloat16")
        assert self.estimate(weights=narrow).weight_bytes == 2 * 6_738_415_616

    def test_grouped_queries_need_their_kv_heads_only(self):
        grouped = dataclasses.replace(LLAMA_2_7B, num_kv_heads=8)
        assert self.estimate(grouped).request_bytes * 4 == self.estimate().request_bytes

    def test_codec_is_counted(self):
        assert self.estimate(codec="float32").request_bytes == 2 * GIB
        assert self.estimate(codec="int8").request_bytes == GIB * (128 + 4) // 256

    def test_a_begun_block_counts_whole(self):
        assert self.estimate(context=65).request_bytes == self.estimate(context=128).request_bytes
        assert self.estimate(context=65).blocks_per_request == 2

    def test_windows_save_nothing_yet_and_it_says_what_they_could(self):
        layers = (LayerSpec(window=256),) * 24 + (LayerSpec(),) * 8
        estimate = self.estimate(dataclasses.replace(LLAMA_2_7B, layers=layers))
        assert estimate.request_bytes == GIB
        assert estimate.windowed_request_bytes == GIB // 4 + 3 * GIB // 4 // 8

    def test_requests_that_fit_beside_the_weights(self):
        estimate = self.estimate()
        assert estimate.num_requests_that_fit(estimate.weight_bytes + 3 * GIB + 5) == 3
        assert estimate.num_requests_that_fit(1000) == 0

    def test_figures_are_plain_integers(self):
        figures = json.loads(json.dumps(dataclasses.asdict(self.estimate())))
        assert all(type(value) is int for value in figures.values())

    def test_total_is_weights_and_kv(self):
        estimate = self.estimate()
        assert estimate.total_bytes == estimate.weight_bytes + estimate.kv_bytes

    @pytest.mark.parametrize("name", ["context", "concurrency", "block_size"])
    def test_refuses_numbers_below_one(self, name):
        with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} must be at least 1"):
            self.estimate(**{name: 0})

    def test_refuses_unknown_codecs(self):
        with pytest.raises(ConfigError, match="received 'int7'; set --kv-cache-dtype"):
            self.estimate(codec="int7")

    def test_agrees_with_the_plan(self):
        spec = make_spec()
        plan = plan_of(spec, memory_gib=32 * BLOCK_BYTES / GIB)
        estimate = self.estimate(spec, context=1024, concurrency=2)
        assert (estimate.kv_bytes, estimate.weight_bytes) == (plan.kv_bytes, plan.weight_bytes)


class TestDetectHardware:
    @pytest.fixture
    def machine(self, tmp_path):
        """Return a writer of files under a fake /proc and /sys/fs/cgroup, and a reader of the result."""

        class Machine:
            proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"

            def write(self, name, text):
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

            def detect(self):
                hardware = detect_hardware(proc=self.proc, cgroup=self.cgroup)
                return dataclasses.replace(hardware, isa=None, why_no_isa="")

        machine = Machine()
        machine.write("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    4000 kB\n")
        return machine

    @pytest.fixture(autouse=True)
    def eight_cpus(self, monkeypatch):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def test_without_control_groups(self, machine):
        assert machine.detect() == Hardware(cpus=8, available_bytes=4000 * 1024)

    def test_version_2_limits(self, machine):
        machine.write("proc/self/cgroup", "0::/a/b\n")
        machine.write("cgroup/a/b/cpu.max", "250000 100000\n")
        machine.write("cgroup/a/b/memory.max", "max\n")
        machine.write("cgroup/a/memory.max", "1000000\n")
        machine.write("cgroup/a/memory.current", "300000\n")
        machine.write("cgroup/a/memory.stat", "anon 5\ninactive_file 100000\n")
        assert machine.detect() == Hardware(cpus=2, available_bytes=800_000)

    def test_version_1_limits(self, machine):
        machine.write("proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n")
        machine.write("cgroup/cpu/job/cpu.cfs_quota_us", "50000\n")
        machine.write("cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
        machine.write("cgroup/memory/job/memory.limit_in_bytes", "2000000\n")
        machine.write("cgroup/memory/job/memory.usage_in_bytes", "500000\n")
        assert machine.detect() == Hardware(cpus=1, available_bytes=1_500_000)

    def test_container_sees_its_limit_at_the_mount(self, machine):
        machine.write("proc/self/cgroup", "0::/../elsewhere\n")
        machine.write("cgroup/cpu.max", "300000 100000")
        assert machine.detect().cpus == 3

    def test_no_limit_is_no_limit(self, machine):
        machine.write("cgroup/cpu.max", "max 100000\n")
        machine.write("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        machine.write("cgroup/cpu/cpu.cfs_period_us", "100000\n")
        assert machine.detect().cpus == 8

    def test_kernels_are_those_of_the_process(self):
        hardware = detect_hardware()
        assert (hardware.isa is not None) == native.available()
        assert hardware.why_no_isa == native.why_not()

    def test_limit_already_exceeded_leaves_nothing(self, machine):
        machine.write("cgroup/memory.max", "1000")
        machine.write("cgroup/memory.current", "5000")
        assert machine.detect().available_bytes == 0

    def test_without_procfs_it_says_what_is_missing(self, machine):
        machine.write("proc/meminfo", "MemTotal: 1 kB\n")
        with pytest.raises(ConfigError, match="MemAvailable"):
            machine.detect()


@pytest.mark.model
def test_real_header(smollm2_path):
    spec = read_spec(smollm2_path)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (30, 3, 64)
    assert spec.num_parameters == 134_515_008


def test_planning_loads_no_tensor_library():
    code = "import sys, kvist.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_of_several_codecs_are_planned_in_bytes() -> None:
    plan = plan_of(hardware=NATIVE_MACHINE, kv_cache_dtype="mixed", memory_gib=0.25)
    assert plan.precision == PRESETS["mixed"]
    assert (plan.codec, plan.demote_before_evict) == ("raw16", True)
    assert plan.kv_bytes <= GIB // 4
    # What the arena keeps back for moving blocks, and the ends of slabs, are no blocks.
    assert 0.95 * GIB / 4 / BLOCK_BYTES < plan.num_blocks <= GIB / 4 / BLOCK_BYTES
    assert f"kv={PRESETS['mixed']}" in plan.one_line()
    assert plan.transforms == "auto"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_precision": "rest=int8"}, "--kv-precision"),
        (
            {"kv_precision": "recent:8=raw16,rest=int8", "kv_cache_dtype": "int8"},
            "--kv-cache-dtype int8",
        ),
        ({"demote_before_evict": "on"}, "--demote-before-evict"),
        ({"kv_cache_dtype": "mixed", "dtype": "float32"}, "--kv-cache-dtype mixed .*--dtype"),
        (
            {"kv_precision": "recent:8=raw16,rest=int8", "dtype": "float32"},
            "received --kv-precision recent:8=raw16,rest=int8 where",
        ),
        ({"kv_cache_dtype": "int4", "kv_cache": "off"}, "received --kv-cache-dtype int4;"),
        ({"kv_cache_dtype": "int4", "refresh_every": 5}, "received --kv-cache-dtype int4;"),
        (
            {"kv_cache_dtype": "int4", "kv_profile": "p.json", "kv_cache": "off"},
            "received --kv-profile p.json, which says int4,",
        ),
        ({"kv_cache_dtype": "mixed", "audit_fraction": 0.5}, "--audit-fraction"),
        ({"kv_cache_dtype": "int4", "audit_fraction": 0.5}, "--audit-fraction"),
        ({"kv_cache_dtype": "int4", "block_size": 32}, "--block-size"),
        ({"kv_cache_dtype": "int3", "block_size": 96}, "--block-size"),
        ({"kv_precision": "recent:8=raw16,rest=int3", "block_size": 16}, "--block-size"),
        ({"kv_cache_dtype": "int4", "kv_cache": "off"}, "--kv-cache off"),
        ({"kv_cache_dtype": "int4", "kv_precision": "recent:8=raw16,rest=int8"}, "int4"),
        ({"kv_cache_dtype": "int4", "dtype": "float32"}, "received --kv-cache-dtype int4"),
        (
            {"kv_cache_dtype": "int8", "kv_transforms": "none"},
            "--kv-transforms none .* --kv-cache-dtype int8 does not use",
        ),
        ({"kv_precision": "recent:8=raw16,rest=int8", "kv_transforms": "x"}, "--kv-transforms x"),
    ],
)
def test_precisions_that_cannot_be_are_refused_by_name(
    options: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_of(hardware=NATIVE_MACHINE, **options)


def test_blocks_of_several_codecs_need_native_kernels() -> None:
    with pytest.raises(ConfigError, match="native kernels"):
        plan_of(hardware=BARE_MACHINE, kv_cache_dtype="mixed")


def test_demotion_for_room_can_be_left_out() -> None:
    options = {"kv_cache_dtype": "mixed", "demote_before_evict": "off"}
    assert not plan_of(hardware=NATIVE_MACHINE, **options).demote_before_evict
    assert not plan_of(hardware=NATIVE_MACHINE).demote_before_evict


def test_refreshing_what_is_not_lossy_is_refused() -> None:
    config = EngineConfig.from_options(refresh_every=5, kv_cache_dtype="raw16")
    with pytest.raises(ConfigError, match=r"--refresh-every .* raw16 keeps what was computed"):
        resolve(config, make_spec(), MACHINE)
    config = EngineConfig.from_options(refresh_every=5, kv_cache_dtype="int8", audit_fraction=0.5)
    plan = resolve(config, make_spec(), MACHINE)
    assert (plan.refresh_every, plan.audit_fraction) == (5, 0.5)
    assert "audit_fraction=0.5 refresh_every=5" in plan.one_line()


@pytest.mark.parametrize("codec", ["int4", "int3"])
def test_longer_contexts_fit_when_old_blocks_are_small(codec: str) -> None:
    """As many blocks as admission would promise to one request alone, and no more."""
    memory_gib = 6 * BLOCK_BYTES / GIB
    options = {"hardware": NATIVE_MACHINE, "memory_gib": memory_gib, "max_batch_tokens": 64}
    raw = plan_of(**options)
    small = plan_of(**options, kv_cache_dtype=codec)
    assert raw.notes
    assert small.max_context_len > 1.5 * raw.max_context_len


def test_an_estimate_knows_every_codec_and_what_a_step_needs() -> None:
    values = {"context": 8192, "concurrency": 4, "block_size": 64}
    raw = memory_estimate(LLAMA_2_7B, **values)
    int4 = memory_estimate(LLAMA_2_7B, codec="int4", **values)
    raw_block, int4_block = raw.old_block_bytes, int4.old_block_bytes
    assert int4_block == 32 * 32 * (64 + 2 * 128 + 16 * 128 * 4)
    assert int4.token_bytes == -(-int4_block // 64)
    # The block being written and the one before it, the first one in int8.
    int8_block = raw_block * (128 + 4) // 256
    assert int4.request_bytes == 125 * int4_block + 2 * raw_block + int8_block
    assert int4.step_bytes == 7 * (raw_block - int4_block)
    assert int4.kv_bytes == 4 * int4.request_bytes + int4.step_bytes
    assert raw.step_bytes == 0
    rule = KVPrecision.parse(PRESETS["int4"])
    assert memory_estimate(LLAMA_2_7B, codec=rule, **values) == int4


def test_a_step_makes_a_few_blocks_smaller_at_most() -> None:
    """By their size, and by the work of encoders that feed errors back."""
    machine = dataclasses.replace(NATIVE_MACHINE, available_bytes=64 * GIB)
    one_head = {"num_layers": 8, "num_heads": 1, "num_kv_heads": 1, "hidden_size": 256}
    spec = make_spec(**one_head, head_dim=256, ropes=(RopeSpec(base=10000.0, dim=256),))
    by_size = DEMOTED_BYTES_PER_STEP // (8 * 2 * 256 * 2 * 64)
    by_work = ENCODED_PRODUCTS_PER_STEP // (8 * 256**2 * 64)
    assert by_size > by_work == 1
    assert plan_of(spec, machine, kv_cache_dtype="int4").max_demotions == by_work
    rule = "sink=raw16,recent:256=raw16,rest=int8"
    assert plan_of(spec, machine, kv_precision=rule).max_demotions == by_size

    small = plan_of(hardware=NATIVE_MACHINE, kv_cache_dtype="int4")
    assert small.max_demotions == DEMOTED_BYTES_PER_STEP // BLOCK_BYTES
    block_size = 64 * (DEMOTED_BYTES_PER_STEP // BLOCK_BYTES + 1)
    large = plan_of(hardware=machine, kv_cache_dtype="int4", block_size=block_size)
    assert large.max_demotions == 1
    assert plan_of(hardware=NATIVE_MACHINE).max_demotions == 0


def test_pins_may_hold_more_blocks_where_blocks_are_small() -> None:
    options = {"hardware": NATIVE_MACHINE, "memory_gib": 0.25, "pin_fraction": 0.5}
    raw, int4 = plan_of(**options), plan_of(**options, kv_cache_dtype="int4")
    assert raw.max_pinned_blocks == raw.num_blocks // 2
    assert int4.max_pinned_blocks > 3 * raw.max_pinned_blocks
    assert (raw.kv_format, int4.kv_format) == ("raw16", PRESETS["int4"])


@pytest.mark.parametrize("codec", ["raw16", "int4", "mixed"])
def test_fewer_dimensions_of_a_head_take_less_memory(codec: str) -> None:
    """A quarter less in 16 bits, and almost a quarter in others: positions have their scales all the same."""
    spec = make_spec(head_dim=64, ropes=(RopeSpec(base=10000.0, dim=64),))
    sizes = {
        kept: memory_estimate(
            spec, codec=codec, context=1024, concurrency=2, block_size=64, kv_head_dim=kept
        ).kv_bytes
        for kept in (None, 48, 64)
    }
    assert sizes[64] == sizes[None]
    assert 0.75 <= sizes[48] / sizes[None] < (0.751 if codec == "raw16" else 0.76)
    options = {"memory_gib": 0.125, "kv_cache_dtype": codec, "weights": "int8"}
    native_machine = dataclasses.replace(MACHINE, isa="avx2")
    whole, reduced = (
        plan_of(spec, native_machine, kv_head_dim=kept, **options) for kept in (None, 48)
    )
    assert (whole.kv_head_dim, reduced.kv_head_dim) == (0, 48)
    assert kv_spec_of(whole, spec).head_dim == 64
    assert kv_spec_of(reduced, spec).head_dim == 48
    assert reduced.num_blocks / whole.num_blocks == pytest.approx(4 / 3, rel=0.03)
    # What is saved is told against whole heads.
    assert reduced.raw_block_bytes == whole.raw_block_bytes
    assert "kv_head_dim=48" in reduced.one_line()
    assert "kv_head_dim=all" in whole.one_line()


def test_all_dimensions_of_a_head_are_no_reduction() -> None:
    assert plan_of(kv_head_dim=16).kv_head_dim == 0


@pytest.mark.parametrize("kept", [0, -8, 4, 20])
def test_dimensions_that_no_block_has_are_refused(kept: int) -> None:
    with pytest.raises(
        ConfigError, match=f"--kv-head-dim must be a multiple of 8, received {kept}"
    ):
        plan_of(kv_head_dim=kept)


def test_more_dimensions_than_a_head_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-head-dim must be at most the 16 dimensions"):
        plan_of(kv_head_dim=24)

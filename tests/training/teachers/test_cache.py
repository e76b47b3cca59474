"""Teacher caches: the same training as with the teacher, on any number of processes,
and every possible mistake.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fcsd.base.files import read_json
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import write_json
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import load_model
from fcsd.model.families.structure import output_head
from fcsd.model.load import ModelFolder
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.teachers import cache as cache_module
from fcsd.training.teachers import cache_fill as cache_stage
from fcsd.training.teachers.base import ModelTeacher
from fcsd.training.teachers.cache import (
    CachedTeacher,
    HiddenCache,
    row_keys,
    write_manifest,
    write_shard,
)
from fcsd.training.teachers.load import identity, read_head, unloaded
from fcsd.training.teachers.lora import AdapterOffTeacher
from tests.losses import objective_of
from tests.reference.ranks import run_ranks
from tests.reference.tiny import gradients_of, tiny_model
from tests.support import (
    Bench,
    assert_killed,
    history,
    killed_after,
    run_command,
    run_of,
    trained_weights,
)
from tests.training.teachers.test_lora import LORA, batch, student_of

TRAIN = {
    "max_steps": 4, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
    "warmup_steps": 1, "logging_steps": 1,
}  # fmt: skip


def live(bench: Bench, name: str = "live", **changes: Any) -> Path:
    """Return a recipe of four steps that runs its teacher."""
    return bench.recipe(name, **{"train": TRAIN, **changes})


def cached(bench: Bench, name: str = "r", **changes: Any) -> Path:
    """Return the same with its teacher in a cache."""
    teacher = {"backend": "cache", "cache": str(bench.folder / "cache")}
    return live(bench, name, **{"teacher": teacher, **changes})


@pytest.fixture
def filled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Path:
    """Return the folder of a complete cache of several shards for the recipe
    `cached`.
    """
    monkeypatch.setattr(cache_stage, "SHARD_BYTES", 20_000)
    assert main(["run", str(cached(bench)), "--only", "cache-teacher"]) == 0
    capfd.readouterr()
    return bench.folder / "cache"


def losses(bench: Bench, name: str) -> list[float]:
    return [entry["loss"] for entry in history(bench, name)]


def error_of(command: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert main(command) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


# ---- the same numbers


def test_all_back_ends_give_the_same_loss_and_gradient_on_the_same_batch(
    tmp_path: Path,
) -> None:
    original = tiny_model("qwen2_moe", num_hidden_layers=2)
    original.save_pretrained(tmp_path / "model")
    facts = unloaded(ModelFolder(ModelConfig(), tmp_path / "model"))
    known = identity(facts, weights_fingerprint(tmp_path / "model"))
    student = student_of(original, LORA)
    rows = [batch(0), batch(1)]
    sharded = ModelTeacher(original)
    for one in (stored := [dict(row) for row in rows]):
        sharded.prepare([one])
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "teacher.json").write_text(json.dumps(known))
    for row in stored:
        parts = zip(
            row_keys(row),
            row["teacher_hidden"].split(len(row["teacher_hidden"]) // 2),
            strict=True,
        )
        written = write_shard(folder, known, list(parts))
        # for those whom the umask allows
        assert written.stat().st_mode == (folder / "teacher.json").stat().st_mode
    places = [
        place
        for path in folder.glob("hidden-*")
        for place in cache_module.read_shard(path, known).values()
    ]
    write_manifest(folder, places)
    teachers = {
        "sharded": sharded,
        "adapter_off": AdapterOffTeacher(student),
        "cache": CachedTeacher(HiddenCache(folder, known), read_head(facts)),
    }

    def step(teacher: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        student.zero_grad()
        batches = [dict(row) for row in rows]
        teacher.prepare(batches)
        student.train()
        total = torch.zeros(())
        for one in batches:
            keep, _ = cache_module.next_token_targets(
                one["labels"], one["position_ids"]
            )
            total = total + student(
                input_ids=one["input_ids"], position_ids=one["position_ids"], keep=keep, objective=objective_of("kl"),
                teacher_hidden=one["teacher_hidden"], teacher_head=teacher.head,
            )["loss"]  # fmt: skip
        total.backward()
        return total.detach(), gradients_of(student)

    loss, gradients = step(teachers["sharded"])
    assert (
        loss > 0.1 and gradients and all(g.abs().max() > 0 for g in gradients.values())
    )
    for name in ("adapter_off", "cache"):
        other, others = step(teachers[name])
        assert torch.equal(loss, other), name
        assert all(torch.equal(gradients[n], others[n]) for n in gradients), name


def test_a_training_on_a_cache_has_the_curve_of_one_with_the_teacher(
    bench: Bench, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_json(filled / "cache.json")
    assert len(manifest["shards"]) > 2 and manifest["rows"] == 60
    assert (
        manifest["tokens"] * 32 * 4
        < manifest["bytes"]
        < manifest["tokens"] * 32 * 4 * 1.2
    )
    assert main(["distill", str(live(bench))]) == 0
    assert main(["distill", str(cached(bench, "r"))]) == 0
    assert losses(bench, "r") == pytest.approx(losses(bench, "live"), rel=1e-5)
    # The backend is not among the inputs of a stage.
    assert main(["distill", str(live(bench, "r"))]) == 0
    monkeypatch.setattr(
        "fcsd.training.teachers.load.load_for_launch",
        lambda *args, **kwargs: pytest.fail("the teacher was loaded"),
    )
    path = cached(bench, "blind", sweep=None)
    assert main(["distill", str(path), "--set", "teacher.spot_check_rows=0"]) == 0
    assert losses(bench, "blind") == losses(bench, "r")


def test_a_sweep_and_variants_share_one_cache_and_run_fills_it_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd.pipeline.distill import distill
    from fcsd.pipeline.sweep import sweep

    plan = {
        "batch_size_tokens": [64, 128], "learning_rate": [1e-3], "steps": 2, "warmup_steps": 0, "last_steps": 1,
    }  # fmt: skip
    variants = {
        "half": {"connectivity.layers": {"last": "50%"}},
        "sft": {"objective.name": "sft"},
    }
    run = run_of(cached(bench, sweep=plan, variants=variants))
    assert run.recipe.variant("sft").teacher is None
    calls = []
    compute = cache_stage._compute
    monkeypatch.setattr(
        cache_stage,
        "_compute",
        lambda *args, **kwargs: (calls.append(args[3]), compute(*args, **kwargs)),
    )
    sweep(run, fill_cache=True)
    distill(run, fill_cache=True)
    distill(run, "half", fill_cache=True)
    assert calls == [60]
    assert (bench.folder / "r" / "variants" / "half" / "model").is_dir()


def test_of_a_stream_the_rows_that_the_longest_training_reads_are_kept(
    bench: Bench,
) -> None:
    data = {"train": [{"path": str(bench.rows)}], "max_length": 32}
    path = cached(bench, data=data)
    assert (
        run_command("run", path, "--only cache-teacher --set train.max_steps=17") == 0
    )
    # 17 steps of 4 rows are more than the stream's 60 rows, whose second epoch has the
    # same rows in another order
    assert read_json(bench.folder / "cache" / "cache.json")["rows"] >= 60
    assert main(["distill", str(path)]) == 0


# ---- processes, and what ends them


def of_a_rank(rank: int, *commands: list[str]) -> list[int]:
    # it has a worker that reads ahead
    multiprocessing.process.current_process()._config["daemon"] = False
    return [main(command) for command in commands]


@pytest.mark.breadth
def test_two_ranks_fill_one_cache_and_train_on_it_as_one_does(bench: Bench) -> None:
    path = str(cached(bench))
    assert run_ranks(
        of_a_rank, 2, ["run", path, "--only", "cache-teacher"], ["distill", path]
    ) == [[0, 0], [0, 0]]
    manifest = read_json(bench.folder / "cache" / "cache.json")
    assert manifest["rows"] == 60 and len(manifest["shards"]) == 2
    assert main(["distill", str(live(bench))]) == 0
    assert losses(bench, "r") == pytest.approx(losses(bench, "live"), rel=1e-3)


def test_a_cache_whose_making_was_killed_is_refused_and_continues_with_what_is_missing(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cache_stage, "SHARD_BYTES", 20_000)
    command = ["run", str(cached(bench)), "--only", "cache-teacher"]
    write = cache_stage.write_shard
    written: list[int] = []

    def killed() -> int:
        def die_in_the_third(folder: Path, known: Any, rows: Any) -> Any:
            written.append(len(rows))
            if len(written) == 3:  # between writing and renaming
                monkeypatch.setattr(
                    os, "replace", lambda *args: os.kill(os.getpid(), signal.SIGKILL)
                )
            return write(folder, known, rows)

        monkeypatch.setattr(cache_stage, "write_shard", die_in_the_third)
        return main(command)

    assert_killed(killed, tmp_path / "output")
    folder = bench.folder / "cache"
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("hidden-*")}
    assert len(kept) == 2 and len(list(folder.glob(".hidden-*"))) == 1
    error = error_of(["distill", str(cached(bench))], capfd)
    assert (
        "the teacher cache is not finished; run `fcsd run RECIPE --only cache-teacher` to continue"
        in error
    )
    computed: list[int] = []
    compute = cache_stage._compute

    def counted(*args: Any, **kwargs: Any) -> None:
        computed.append(args[3])
        compute(*args, **kwargs)

    monkeypatch.setattr(cache_stage, "_compute", counted)
    assert main(command) == 0
    assert computed[0] < 60 and not list(folder.glob(".hidden-*"))
    assert all(
        (folder / name).stat().st_mtime_ns == time for name, time in kept.items()
    )
    assert read_json(folder / "cache.json")["rows"] == 60
    assert main(command) == 0 and len(computed) == 1


def test_the_disk_is_asked_for_exactly_the_rows_of_a_batch(
    bench: Bench, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HiddenCache(filled, read_json(filled / "teacher.json"))
    reads: list[bytes] = []

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        reads.append(os.pread(file, length, offset))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    keys = list(cache.places)[::7]
    cache.will_need([*keys, b"not in the cache"])
    assert reads == [cache.read([key]).numpy().tobytes() for key in keys]


@pytest.mark.breadth
def test_a_killed_training_on_a_cache_continues_to_the_same_weights(
    bench: Bench, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train": TRAIN | {"save_steps": 2}}
    assert main(["distill", str(cached(bench, "whole", **changes))]) == 0
    command = ["distill", str(cached(bench, "killed", **changes))]
    killed_after(
        monkeypatch,
        writer_module,
        "replace_folder",
        lambda: main(command),
        tmp_path / "output",
    )
    assert main(command) == 0
    assert trained_weights(bench, "whole") == trained_weights(bench, "killed")


def test_a_disk_without_room_is_refused_before_the_teacher_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(bench.folder)._replace(free=1 << 20)
    monkeypatch.setattr(cache_stage.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(
        "fcsd.training.teachers.load.load_for_launch",
        lambda *args, **kwargs: pytest.fail("the teacher was loaded"),
    )
    error = error_of(["run", str(cached(bench)), "--only", "cache-teacher"], capfd)
    assert re.search(
        r"60 rows with \d+ tokens with loss need [\d.]+ KiB; 1.0 MiB are free at .*set teacher\.cache to another",
        error,
    )


# ---- caches that do not fit


def test_other_rows_are_counted_and_added_by_filling_again(
    bench: Bench, filled: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = str(
        cached(bench, data={"train": [{"path": str(bench.rows)}], "max_length": 64})
    )
    longer = [other, "--set", "train.batch_size_tokens=256"]
    error = error_of(["distill", *longer], capfd)
    assert re.search(
        r"\d+ of \d+ rows of the training data are not in the teacher cache: other"
        r" data",
        error,
    )
    assert "`fcsd run RECIPE --only cache-teacher` to add the missing rows" in error
    assert main(["run", *longer, "--only", "cache-teacher"]) == 0
    assert main(["distill", *longer]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["model.dtype=bfloat16"], 'computing_dtype: null -> "float32"; dtype: "float32" -> "bfloat16"'),
        (["model.attn_implementation=eager"], 'attn_implementation: "sdpa" -> "eager"'),
        (["model.experts_implementation=eager"], 'experts_implementation: ".*" -> "eager"'),
    ],
)  # fmt: skip
def test_a_cache_of_a_teacher_that_computes_otherwise_is_refused(
    bench: Bench,
    filled: Path,
    change: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    error = error_of(["distill", str(cached(bench)), "--set", *change], capfd)
    assert re.search(
        rf"cache: holds the hidden states of another teacher \({message}; cache ->"
        r" recipe\)",
        error,
    )


def test_a_cache_of_another_revision_of_the_weights_is_refused(
    bench: Bench, filled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bench.base, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    error = error_of(
        ["distill", str(cached(bench)), "--set", f"model.path={tmp_path / 'other'}"],
        capfd,
    )
    assert re.search(
        r"another teacher \(weights: other content; cache -> recipe\)", error
    )


def test_a_digit_of_the_list_of_shards_does_not_change_unseen(
    bench: Bench, filled: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = filled / "cache.json"
    write_json(path, read_json(path) | {"tokens": 1})
    error = error_of(["distill", str(cached(bench))], capfd)
    assert (
        f"{path}: is damaged: its content differs from what was written; remove it"
        in error
    )
    path.unlink()
    assert main(["run", str(cached(bench)), "--only", "cache-teacher"]) == 0
    assert read_json(path)["rows"] == 60


def test_a_missing_a_cut_and_a_changed_shard_are_noticed_and_mended(
    bench: Bench, filled: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, fill = (
        ["distill", str(cached(bench))],
        ["run", str(cached(bench)), "--only", "cache-teacher"],
    )
    shard = sorted(filled.glob("hidden-*"))[0]
    whole = shard.read_bytes()
    shard.unlink()
    error = error_of(train, capfd)
    assert (
        f"{shard}: no such file, but cache.json names this shard; run `fcsd run RECIPE"
        " --only cache-teacher`" in error
    )
    shard.write_bytes(whole[:-100])
    error = error_of(train, capfd)
    assert f"{shard}: damaged or incomplete shard ({len(whole) - 100} bytes" in error
    assert (
        "; run `fcsd run RECIPE --only cache-teacher` to compute its rows again"
        in error
    )
    assert main([*fill, "--verify"]) == 0  # removed, its rows computed again
    assert read_json(filled / "cache.json")["rows"] == 60
    # The same length, but different content: what is read is compared.
    shard = sorted(filled.glob("hidden-*"))[0]
    damaged = bytearray(shard.read_bytes())
    begin = len(damaged) // 2
    damaged[begin : begin + 400] = bytes(400)
    shard.write_bytes(damaged)
    error = error_of([*fill, "--verify"], capfd)
    assert (
        f"{shard}: is damaged: a row's hidden states differ from what was written; remove the file"
        in error
    )
    for rows in (0, 60):  # with and without a spot check
        error = error_of([*train, "--set", f"teacher.spot_check_rows={rows}"], capfd)
        assert (
            f"{shard}: is damaged: a row's hidden states differ from what was written; remove the file"
            in error
        )
    shard.write_bytes(b"\x10" + bytes(len(damaged) - 1))
    assert "damaged or incomplete shard" in error_of(train, capfd)


def test_the_spot_check_refuses_a_cache_that_other_software_made(
    bench: Bench, filled: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with safe_open(sorted(filled.glob("hidden-*"))[0], "pt") as file:
        hidden, keys, ends = (
            file.get_tensor(name) for name in ("hidden", "keys", "ends")
        )
    parts = hidden.tensor_split(ends[:-1])
    rows = [
        (key.tobytes(), 1.01 * part)
        for key, part in zip(keys.numpy(), parts, strict=True)
    ]
    write_shard(filled, read_json(filled / "teacher.json"), rows)
    train = ["distill", str(cached(bench)), "--set", "teacher.spot_check_rows=60"]
    said = r"the spot check found a row whose hidden states are .* more than 0.001"
    assert re.search(said, error_of(train, capfd))


def test_a_folder_that_is_no_cache_is_named(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(cached(bench))
    assert (
        "holds no teacher cache; fill it with `fcsd run RECIPE --only cache-teacher`"
        in error_of(["distill", path], capfd)
    )
    (bench.folder / "cache").mkdir()
    # Files that a kill leaves while the first file is written, and files of the system,
    # belong to nobody.
    for name in (".teacher.json.0a1b2c3d-17-0123abcd.tmp", ".DS_Store"):
        (bench.folder / "cache" / name).touch()
    assert main(["run", path, "--only", "cache-teacher"]) == 0
    shutil.rmtree(bench.folder / "cache")
    (bench.folder / "cache").mkdir()
    (bench.folder / "cache" / "mine.txt").write_text("mine")
    error = error_of(["run", path, "--only", "cache-teacher"], capfd)
    assert "exists and holds no teacher cache; choose another folder" in error
    error = error_of(
        [
            "run", path, "--only", "cache-teacher", "--set", "teacher=null", "--set", "objective.name=sft",
        ],
        capfd,
    )  # fmt: skip
    assert "objective 'sft' has no teacher" in error


# ---- another teacher


def test_another_checkpoint_may_be_the_teacher_of_any_width_if_its_tokenizer_is_the_same(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide"
    # Another family, whose logits are scaled
    tiny_model(
        "granitemoe", num_hidden_layers=3, vocab_size=300, hidden_size=48, seed=5
    ).save_pretrained(wide)
    tiny_tokenizer(300).save_pretrained(wide)
    assert main(["distill", str(live(bench, teacher={"path": str(wide)}))]) == 0
    path = str(
        cached(
            bench,
            "r",
            teacher={
                "backend": "cache",
                "path": str(wide),
                "cache": str(tmp_path / "c"),
            },
        )
    )
    assert main(["run", path, "--only", "cache-teacher"]) == 0
    assert main(["distill", path]) == 0
    assert losses(bench, "r") == pytest.approx(losses(bench, "live"), rel=1e-5)
    assert (
        "teacher"
        in read_json(bench.folder / "r" / "distill" / "manifest.json")["inputs"]
    )
    # A stage that was distilled from another teacher is a different stage.
    error = error_of(["distill", str(live(bench, "r"))], capfd)
    assert re.search(
        r'was made with other settings \(teacher: "\w+\.\.\. -> null;'
        r" teacher/config\.json: ",
        error,
    )

    vocabulary = yaml.safe_load((wide / "tokenizer.json").read_text())
    names = vocabulary["model"]["vocab"]
    names["<unused280>"], names["<unused281>"] = (
        names.pop("<unused22>"),
        names["<unused23>"],
    )
    (wide / "tokenizer.json").write_text(json.dumps(vocabulary))
    error = error_of(
        ["distill", str(live(bench, "other", teacher={"path": str(wide)}))], capfd
    )
    assert re.search(
        r"teacher.path .*: its tokenizer is not the student's: \d+ tokens", error
    )


def test_a_farskip_checkpoint_is_distilled_further_from_its_original_and_never_from_itself(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["distill", str(live(bench, "first"))]) == 0
    model = {"path": str(bench.folder / "first" / "distill" / "model")}
    further = live(bench, "further", model=model, teacher={"path": str(bench.base)})
    assert main(["distill", str(further)]) == 0
    assert losses(bench, "further")[0] < losses(bench, "first")[0]
    for sections in ({}, {"teacher": {"backend": "adapter_off"}, "lora": LORA}):
        error = error_of(
            ["distill", str(live(bench, "itself", model=model, **sections))], capfd
        )
        assert (
            "is a FarSkip checkpoint, so as its own teacher it would teach nothing; set teacher.path"
            in error
        )
    error = error_of(
        ["run", str(live(bench, "itself", model=model)), "--only", "cache-teacher"],
        capfd,
    )
    assert "as its own teacher it would teach nothing" in error
    # the connectivity goes, the weights stay trained
    regular = str(bench.folder / "regular")
    assert main(["unconvert", model["path"], regular]) == 0
    error = error_of(
        ["distill", str(live(bench, "itself", model={"path": regular}))], capfd
    )
    assert (
        "was trained as a FarSkip checkpoint, so as its own teacher it would teach nothing"
        in error
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {}), ("qwen2_moe", {"tie_word_embeddings": True}), ("phimoe", {"lm_head_bias": True}),
        ("granitemoe", {}), ("gemma4_text", {}), ("llama4_text", {}), ("qwen3_vl_moe", {}), ("deepseek_v3", {}),
    ],
)  # fmt: skip
def test_the_head_is_read_from_the_files_as_the_loaded_model_has_it(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(family, dtype=torch.bfloat16, **changes).save_pretrained(tmp_path)
    facts = unloaded(ModelFolder(ModelConfig(dtype="float32"), tmp_path))
    loaded = load_model(tmp_path, dtype="float32")
    run = ModelTeacher(loaded).head
    scaling = run.logit_scale, run.softcap
    attach_loss_head(loaded)
    head, expected = read_head(facts), output_head(loaded)
    assert head.weight.dtype == torch.float32
    assert torch.equal(head.weight, expected.weight)
    assert (head.bias is None) == (expected.bias is None)
    assert head.bias is None or torch.equal(head.bias, expected.bias)
    assert (
        (head.logit_scale, head.softcap)
        == scaling
        == (expected.logit_scale, expected.softcap)
    )
    known = identity(facts, "w")
    text = loaded.config.get_text_config()
    assert known["attn_implementation"] == text._attn_implementation
    assert known["experts_implementation"] == text._experts_implementation
    assert unloaded(ModelFolder(ModelConfig(), tmp_path)).dtype == torch.bfloat16


def test_a_teacher_that_is_given_by_its_path_and_is_the_student_is_refused(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    far = str(tmp_path / "far")
    assert main(["convert", str(bench.base), far, "--layers", "all"]) == 0
    live_one = live(bench, "itself", teacher={"path": far})
    cache = {"backend": "cache", "path": far, "cache": str(tmp_path / "cache")}
    cached_one = str(live(bench, "cached", teacher=cache))
    for command in (
        ["distill", str(live_one)],
        ["distill", cached_one],
        ["run", cached_one, "--only", "cache-teacher"],
    ):
        error = error_of(command, capfd)
        assert re.search(
            r": error: teacher\.path \S+far: has the weights of the student and its"
            r" connectivity \(layers .*\), so it would teach nothing; give the original$",
            error,
        ), error

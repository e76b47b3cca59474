"""The contract of multimodal wrappers: their text stack is rewired, images still work,
the rest is left alone.
"""

import json

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    load_model,
    resolve_layers,
    unconvert_checkpoint,
    unconvert_model,
)
from fcsd.model.families import FAMILIES, UNAVAILABLE, family_of, moe_mask
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.float64 import BOUND, error
from tests.model.connectivity.test_export import run_without_fcsd
from tests.reference.images import IMAGES, image_inputs
from tests.reference.multimodal import (
    ADAPTED,
    MULTIMODAL_MOE,
    multimodal_reference_forward,
    text_stack,
)
from tests.reference.parts import arguments_computed_once
from tests.reference.tiny import tiny_config, tiny_model
from tests.reference.tiny.multimodal import IMAGE
from tests.support import WRAPPERS, assert_same_model, edited_json, few, user_error

SIDES = (("partial", "outdated"), ("partial", "full"), ("full", "outdated"))
FLOAT64 = pytest.mark.usefixtures("float64")


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@torch.no_grad()
def reference(model, layers, inputs, *sides):
    return multimodal_reference_forward(model, layers, *sides, **inputs)


def text_only(seed=1):
    return {
        "input_ids": torch.randint(
            3, IMAGE, (2, 11), generator=torch.Generator().manual_seed(seed)
        )
    }


def left_padded(inputs, padding=3):
    """Return the first row after `padding` pads, and the second with its first tokens
    masked.
    """
    rows = inputs["input_ids"].shape[0]
    pads = torch.zeros(rows, padding, dtype=torch.long)
    mask = torch.ones(rows, padding + inputs["input_ids"].shape[1], dtype=torch.long)
    mask[:, :padding] = 0
    padded = {
        **inputs,
        "input_ids": torch.cat([pads, inputs["input_ids"]], dim=1),
        "attention_mask": mask,
    }
    for name in {"mm_token_type_ids", "moe_mm_token_type_ids"} & inputs.keys():
        padded[name] = torch.cat([pads.int(), inputs[name]], dim=1)
    return padded


def test_every_wrapper_has_a_reference_and_images():
    references = MULTIMODAL_MOE.keys() | ADAPTED.keys()
    assert references == IMAGES.keys()
    assert set(WRAPPERS) == references - UNAVAILABLE.keys()


def test_a_wrapper_whose_text_stack_is_dense_is_refused():
    with user_error("'glm4v_moe': this model is dense, none of its 4 layers"):
        family_of(tiny_config("glm4v_moe", first_k_dense_replace=4))


@FLOAT64
@pytest.mark.parametrize("name", few(WRAPPERS, 6))
def test_a_rewired_wrapper_computes_the_equations_with_and_without_images(name):
    model = tiny_model(name)
    mask = moe_mask(model.config, FAMILIES[name])
    cases = [
        (selection, *SIDES[0])
        for selection in ("all", "moe", {"first": 2}, [0, 2], [2, 3])
    ]
    cases += [("all", *sides) for sides in SIDES[1:]]
    for inputs in (image_inputs(name), text_only()):
        with arguments_computed_once():
            references = [
                reference(model, resolve_layers(selection, mask), inputs, *sides)[0]
                for selection, *sides in cases
            ]
        for (selection, *sides), expected in zip(cases, references, strict=True):
            layers = resolve_layers(selection, mask)
            assert (
                convert_model(model, Connectivity(selection, *sides), regular_ok=True)
                == layers
            )
            assert error(logits(model, inputs), expected) < BOUND, (selection, sides)
            unconvert_model(model)


@FLOAT64
@pytest.mark.parametrize("name", few(WRAPPERS, 6))
def test_left_padding_and_eager_attention_change_nothing_in_the_equations(name):
    model = tiny_model(name, attn_implementation="eager")
    inputs = left_padded(image_inputs(name))
    expected, _ = reference(model, range(4), inputs)
    convert_model(model, Connectivity("all"))
    assert error(logits(model, inputs)[:, 3:], expected[:, 3:]) < BOUND


@FLOAT64
@pytest.mark.parametrize("name", few(WRAPPERS, 6))
def test_another_image_gives_other_logits(name):
    model, inputs = tiny_model(name), image_inputs(name)
    convert_model(model, Connectivity("all"))
    other = inputs | {"pixel_values": image_inputs(name, seed=1)["pixel_values"]}
    difference = (logits(model, inputs) - logits(model, other)).abs().amax(-1)
    before = inputs["input_ids"].eq(IMAGE).cumsum(1) == 0
    # causal: tokens before the image do not see it
    assert difference[before].max() < BOUND
    assert difference[:, -1].min() > 0.1


@pytest.mark.parametrize("name", WRAPPERS)
def test_only_the_text_stack_is_rewired(name):
    model = tiny_model(name)
    classes = {path: type(module) for path, module in model.named_modules() if path}
    parameters = {path: id(parameter) for path, parameter in model.named_parameters()}
    convert_model(model, Connectivity("all"))
    assert type(model).__name__ == f"FarSkip{FAMILIES[name].causal_lm}"
    stack = text_stack(model)[0]
    path_of = {module: path for path, module in model.named_modules()}
    swapped = {
        path
        for path, module in model.named_modules()
        if path and type(module) is not classes[path]
    }
    layers = {path_of[layer] for layer in stack.layers}
    blocks = {path_of[getattr(layer, FAMILIES[name].moe)] for layer in stack.layers}
    assert layers <= swapped <= layers | blocks | {path_of[stack]}
    assert {
        path: id(parameter) for path, parameter in model.named_parameters()
    } == parameters


@FLOAT64
@pytest.mark.parametrize("name", few(WRAPPERS))
def test_generating_with_the_cache_gives_what_full_passes_give(name):
    # The original of MiniMax M3 also chooses other groups of keys with the cache when
    # there are pads.
    model, inputs = (
        tiny_model(name),
        left_padded(image_inputs(name), 0 if name == "minimax_m3_vl" else 3),
    )
    convert_model(model, Connectivity("all"))
    settings = {
        "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    # a piece of an image must not be generated
    settings |= {"suppress_tokens": list(range(IMAGE, 106))}
    made = model.generate(**inputs, use_cache=True, **settings)
    full = inputs | {"input_ids": made.sequences}
    added = made.sequences.shape[1] - inputs["input_ids"].shape[1]
    for key, value in (
        ("attention_mask", 1),
        ("mm_token_type_ids", 0),
        ("moe_mm_token_type_ids", 0),
    ):
        if key in inputs:
            full[key] = torch.nn.functional.pad(inputs[key], (0, added), value=value)
    if "mrope_section" not in getattr(
        model.config.get_text_config(), "rope_parameters", {}
    ):
        # As `generate` counts them; without, pads count, too.
        full["position_ids"] = (full["attention_mask"].cumsum(1) - 1).clamp(min=0)
    actual = torch.stack(made.logits, dim=1)
    assert error(actual, logits(model, full)[:, -added - 1 : -1]) < BOUND


@FLOAT64
@pytest.mark.parametrize("name", few(WRAPPERS))
def test_configs_are_shared_inside_a_wrapper_and_with_no_other_model(name):
    config, inputs = tiny_config(name), image_inputs(name)
    cls = type(tiny_model(name))
    teacher, student = cls(config).eval(), tiny_model(name)
    teacher.load_state_dict(student.state_dict())
    student = cls(config).eval()
    student.load_state_dict(teacher.state_dict())
    before = logits(teacher, inputs)
    convert_model(student, Connectivity("all"))
    assert torch.equal(logits(teacher, inputs), before)
    assert not hasattr(config, "farskip") and config.model_type == name
    expected = logits(student, inputs)
    student.set_attn_implementation("eager")
    text = student.config.get_text_config()
    assert (
        text
        is text_stack(student)[0].config
        is text_stack(student)[0].layers[1].self_attn.config
    )
    assert text._attn_implementation == "eager"
    assert error(logits(student, inputs), expected) < BOUND
    # The text stacks of HY 4 and Inkling 2 have no other one.
    before = config.get_text_config()._attn_implementation
    assert before != "eager" or name in ("hy_v4_vl", "inkling2")


def test_a_config_with_the_text_fields_at_the_top_is_converted(tmp_path):
    """dots3_note and unlimited_ocr are published so."""
    for name, inside in (("dots3_note", None), ("unlimited_ocr", "language_config")):
        model, inputs = tiny_model(name), image_inputs(name)
        base = tmp_path / name / "base"
        model.save_pretrained(base)
        with edited_json(base / "config.json") as config:
            text = config.pop("text_config")
            for key in ("model_type", "architectures", "dtype"):
                text.pop(key, None)
            config |= text if inside is None else {inside: text}
        assert_same_model(load_model(base), model, inputs)
        convert_checkpoint(base, tmp_path / name / "far", Connectivity("moe"))
        convert_model(model, Connectivity("moe"))
        assert_same_model(load_model(tmp_path / name / "far"), model, inputs)


@pytest.fixture
def aria_with_processor(tmp_path):
    """Write a tiny Aria as it is published, with tokenizer and processor beside the
    weights.
    """
    from PIL import Image
    from transformers import AriaProcessor, PreTrainedTokenizerFast
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    base = tmp_path / "base"
    tiny_model("aria").save_pretrained(base)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(106).backend_tokenizer,
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<unused0>"},
    )
    AriaProcessor(
        image_processor=AriaImageProcessorPil(), tokenizer=tokenizer
    ).save_pretrained(base)
    pixels = torch.randint(
        0, 256, (40, 60, 3), generator=torch.Generator().manual_seed(0)
    )
    Image.fromarray(pixels.byte().numpy()).save(tmp_path / "image.png")
    return base


def test_the_files_of_a_processor_stay_byte_for_byte_through_conversion_and_back(
    tmp_path,
):
    """In their published form, in that of older checkpoints (which name no class), and
    in a form that no program here would write.
    """
    tiny_model("llama4").save_pretrained(tmp_path / "base")
    files = {
        "preprocessor_config.json": b'{ "image_processor_type": "Llama4ImageProcessor",\n\t"size": {"height":336}}',
        "processor_config.json": b'{"patch_size": 14, "fake_image_token": "<|image|>"}\r\n',
        "video_preprocessor_config.json": b'{"fps": 2.0}',
        "chat_template.json": '{"chat_template": "{{ \'\u00e9\' }}"}'.encode(),
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / "base" / name).write_bytes(data)
    convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    unconvert_checkpoint(tmp_path / "far", tmp_path / "back")
    for folder in ("far", "back"):
        assert {
            name: (tmp_path / folder / name).read_bytes() for name in files
        } == files, folder


def test_tokenizer_and_processor_of_an_export_load_without_fcsd_and_never_wait(
    aria_with_processor, tmp_path
):
    base, far = aria_with_processor, tmp_path / "far"
    # As in older checkpoints: only the model type determines the classes.
    for name, key in (
        ("tokenizer_config.json", "tokenizer_class"),
        ("processor_config.json", "processor_class"),
    ):
        with edited_json(base / name) as values:
            values.pop(key)
            if name == "tokenizer_config.json":
                values.pop("processor_class")
    convert_checkpoint(base, far, Connectivity("all"))
    code = """
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
image = Image.open(sys.argv[4])
processor_of = AutoProcessor.from_pretrained
def outputs(folder, **options):
    processor = AutoProcessor.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    made = processor(images=image, text="see <unused0> now", return_tensors="pt")
    return type(processor).__name__, type(tokenizer).__name__, tokenizer("see now")["input_ids"], dict(made)
expected = outputs(sys.argv[2])
for options in ({"trust_remote_code": False}, {}):
    # The files do not name the class, and the code that does may not run: it is the tokenizer alone, as for any
    # model type that transformers does not know.
    assert not isinstance(AutoProcessor.from_pretrained(sys.argv[3], **options), type(processor_of(sys.argv[2])))
got = outputs(sys.argv[3], trust_remote_code=True)
assert got[:3] == expected[:3], (got[:3], expected[:3])
assert got[3].keys() == expected[3].keys()
assert all(torch.equal(got[3][name], value) for name, value in expected[3].items())
print("DONE", expected[0])
"""
    done = run_without_fcsd(code, tmp_path, base, far, tmp_path / "image.png")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE AriaProcessor" in done.stdout


def test_the_code_that_a_tokenizer_names_as_its_own_is_carried_and_other_code_is_not(
    tmp_path,
):
    base = tmp_path / "base"
    tiny_model("aria").save_pretrained(base)
    own = {
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
        "tokenizer_class": "Own",
    }
    (base / "tokenizer_config.json").write_text(json.dumps(own))
    (base / "tokenization_own.py").write_text(
        "from .helper_own import help\n\nclass Own:\n    pass\n"
    )
    (base / "helper_own.py").write_text("def help():\n    pass\n")
    (base / "modeling_other.py").write_text("raise SystemExit\n")
    convert_checkpoint(base, tmp_path / "far", Connectivity("all"))
    assert {file.name for file in (tmp_path / "far").glob("*.py")} == {
        "tokenization_own.py", "helper_own.py", "modeling_farskip.py"
    }  # fmt: skip
    assert json.loads((tmp_path / "far" / "tokenizer_config.json").read_text()) == own


def test_code_of_a_hub_repository_is_named_there(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshot"
    tiny_model("aria").save_pretrained(snapshot)
    names = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(names))
    monkeypatch.setattr(
        "fcsd.model.connectivity.export.find_folder", lambda *_, **__: snapshot
    )
    convert_checkpoint("owner/name", tmp_path / "far", Connectivity("all"))
    carried = json.loads((tmp_path / "far" / "tokenizer_config.json").read_text())
    assert carried == {
        "auto_map": {"AutoTokenizer": ["owner/name--tokenization_own.Own", None]}
    }

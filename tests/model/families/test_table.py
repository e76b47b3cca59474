"""`fcsd families` agrees with the registry and the layers."""

from fcsd.model.families import FAMILIES, REFUSED
from fcsd.model.families.table import families_facts, families_table


def test_json_has_every_family_and_every_refusal():
    table = families_facts()
    assert [row["model_type"] for row in table["families"]] == sorted(FAMILIES)
    assert table["refused"] == REFUSED
    rows = {row["model_type"]: row for row in table["families"]}
    assert rows["qwen3_moe"] == {
        "model_type": "qwen3_moe", "model_class": "Qwen3MoeForCausalLM", "multimodal": False, "shared_experts": False,
        "additive": True,
        "dense_layers": ["num_experts", "decoder_sparse_step", "mlp_only_layers"],
        "reference": "written",
        "training": {"overlap": "between layers", "because": None},
        "served_by": ["vLLM", "SGLang"],
    }  # fmt: skip
    assert rows["gemma4"]["served_by"] == ["vLLM"]
    glm = rows["glm_moe_dsa"]
    assert glm["served_by"] == [] and glm["training"]["overlap"] == "inside the layer"
    assert rows["nemotron_h"]["training"]["overlap"] == "none"
    assert rows["nemotron_h"]["training"]["because"].startswith("each of its layers is")
    assert rows["granitemoe_swa"]["shared_experts"]
    assert rows["granitemoe_swa"]["dense_layers"] == []
    assert rows["aria"]["multimodal"]
    assert rows["aria"]["model_class"].endswith("ConditionalGeneration")
    assert not rows["afmoe"]["additive"] and not rows["mellum"]["shared_experts"]
    assert rows["laguna"]["reference"] == "generic"


def test_text_is_two_markdown_tables_with_a_line_each():
    families, refused = families_table(families_facts()).split("\n\n")
    assert len(families.splitlines()) == 2 + len(FAMILIES)
    assert len(refused.splitlines()) == 2 + len(REFUSED)
    assert all(line.count("|") == 8 for line in families.splitlines())
    (deepseek,) = (
        line for line in families.splitlines() if line.startswith("| deepseek_v3 ")
    )
    cells = [cell.strip() for cell in deepseek.strip("|").split("|")]
    assert cells == [
        "deepseek_v3", "DeepseekV3ForCausalLM", "yes", "first_k_dense_replace", "written by hand",
        "between layers", "vLLM, SGLang",
    ]  # fmt: skip

"""The prompts of a suite, on which routing is counted, are the texts that its tasks
use.
"""

from pathlib import Path

from fcsd.evaluation.items import suite_prompts
from fcsd.evaluation.suites import changed_suite, load_suite, named_tasks
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data
from tests.support import json_lines


def test_prompts_are_the_questions_in_the_form_that_each_task_asks(
    tmp_path: Path,
) -> None:
    write_tiny_data(
        tmp_path,
        num_train=40,
        num_distill=4,
        num_heldout=4,
        num_validation=4,
        num_test=8,
        vocab_size=400,
    )
    root, tokenizer = tmp_path / "data", tiny_tokenizer(300)
    prompts = [
        tokenizer.decode(row)
        for row in suite_prompts(load_suite("tiny"), root, tokenizer, 3)
    ]

    def rows(name: str) -> list[dict[str, str]]:
        return json_lines(root / "fcsd" / name / "test.jsonl")[:3]

    questions = [
        row["question"]
        for name in ("tiny-choice", "tiny-answers")
        for row in rows(name)
    ]
    assert prompts[3:] == [
        f"<bos><user> {question}<assistant> " for question in questions
    ]
    for prompt, row in zip(prompts[:3], rows("tiny-code"), strict=True):
        assert prompt.startswith("<bos><user> ")
        assert row["prompt"] in prompt
    # A row's own limit counts where it is smaller.
    suite = load_suite("tiny")
    rows = [row.model_copy(update={"limit": 1}) for row in suite.tasks]
    suite = suite.model_copy(update={"tasks": rows})
    for limit in (3, None):
        found = suite_prompts(suite, root, tokenizer, limit)
        assert [tokenizer.decode(row) for row in found] == prompts[::3]
    plain = changed_suite(named_tasks("tiny", ["tiny_choice"]))
    plain = plain.model_copy(
        update={
            "tasks": [plain.tasks[0].model_copy(update={"chat_template": False, "num_fewshot": 1})],
        }
    )  # fmt: skip
    one, *_ = (
        tokenizer.decode(row) for row in suite_prompts(plain, root, tokenizer, 2)
    )
    assert one.endswith(questions[0])
    assert len(one) > len(questions[0])

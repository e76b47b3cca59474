from fcsd.evaluation.results import shown_question


def test_the_question_is_what_the_requests_share_in_whole_words() -> None:
    assert shown_question([("2 + 2 =", " 4"), ("2 + 2 =", " 5")]) == {
        "prompt": "2 + 2 =",
        "choices": [" 4", " 5"],
    }
    assert shown_question([("so the bed", " broke"), ("so the blanket", " broke")]) == {
        "prompt": "so the ",
        "choices": ["bed broke", "blanket broke"],
    }
    assert shown_question([("to Mar", " x"), ("to Maria", " x")])["choices"] == [
        "Mar x",
        "Maria x",
    ]
    assert shown_question([("bed", "!"), ("blanket", "!")]) == {
        "prompt": "",
        "choices": ["bed!", "blanket!"],
    }
    assert shown_question([("write f", "")]) == {"prompt": "write f"}
    assert shown_question([]) == {}


def test_of_a_long_prompt_the_end_is_shown() -> None:
    shown = shown_question([("x" * 3000 + " question?", "a")])["prompt"]
    assert (
        len(shown) == 2001 and shown.startswith("…xxx") and shown.endswith(" question?")
    )

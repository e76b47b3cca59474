"""The member tasks of a group (`mmlu`), told by the names of its items."""

from collections.abc import Mapping, Sequence
from typing import Any

Sample = Mapping[str, Any]


def by_member(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Split the samples of a group (`mmlu`) by its member tasks; {} for a task that is
    no group.

    Items of a group are named `member/number`; so are problems of code tasks
    (`Mbpp/2`), which have no members.
    """
    members: dict[str, list[Sample]] = {}
    for sample in samples:
        # Either all items of a task have a member in their names, or none has.
        member, slash, _ = str(sample["doc_id"]).rpartition("/")
        if not slash or kind == "code":
            return {}
        members.setdefault(member, []).append(sample)
    return members

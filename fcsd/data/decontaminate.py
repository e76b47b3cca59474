"""Find the training examples that share an n-gram with a test item, leave them out, and
list them.

The rule is that of GPT-3 (Brown et al. 2020, arXiv:2005.14165, App. C) and of lm-eval:
texts become lower-case words without punctuation, and an example is left out when it
shares `ngram` (13) words in a row with a test item. There are two additions. A shorter
text of an item matches when all of it occurs and it has at least `SHORTEST` words,
GPT-3's lower limit. Wordings that tell nothing about an item do not match: those that
more than `COMMON` items of a benchmark share, and n-grams of which more than half are
numbers.

Not covered: paraphrases, translations, items that are shorter still (they are counted),
text without spaces between words.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fcsd.data.examples import example_texts
from fcsd.data.sources import Source, columns_of

SHORTEST = 8
COMMON = 10
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Item:
    """One item of a test set; `id` is that of the evaluation's samples, `texts` are
    compared one by one.
    """

    task: str
    id: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A training example that was left out, and the words that it shares with an item."""

    source: str
    example_sha256: str  # of its texts, a line break between two
    begins: str
    task: str
    item: str
    ngram: str


class ItemIndex:
    """The n-grams of all test items, looked up by their first `SHORTEST` words."""

    def __init__(self, items: Iterable[Item], ngram: int = 13):
        self.ngram, self.first = ngram, min(SHORTEST, ngram)
        self.vocabulary: dict[str, int] = {}  # word -> number from 1
        self.items: list[tuple[str, str]] = []
        # task -> items that have no text long enough
        self.unchecked: Counter[str] = Counter()
        texts: list[np.ndarray] = []
        owners: list[int] = []
        for item in items:
            item_texts = [
                self._word_numbers(words(text)) for text in dict.fromkeys(item.texts)
            ]
            # Texts below the limit are only counted, as unchecked.
            item_texts = [text for text in item_texts if len(text) >= self.first]
            self.unchecked[item.task] += not item_texts
            texts += item_texts
            owners += [len(self.items)] * len(item_texts)
            self.items.append((item.task, item.id))
        # Each word has a random number; the hash of an n-gram is the sum of its words'
        # numbers, each times a power of an odd number.
        generator = np.random.default_rng(0)
        self._values = generator.integers(
            1, 2**64, len(self.vocabulary) + 1, dtype=np.uint64
        )
        self._names = ["", *self.vocabulary]
        self._is_number = np.array([name.isdigit() for name in self._names])
        self._add(texts, owners)

    def _word_numbers(self, text: list[str]) -> np.ndarray:
        numbers = [
            self.vocabulary.setdefault(word, len(self.vocabulary) + 1) for word in text
        ]
        return np.array(numbers, np.int32)

    def _add(self, texts: list[np.ndarray], owners: list[int]) -> None:
        """Add n-grams: the position of each in the joined texts, its length and its
        item, sorted by the hash of their first words.
        """
        indices, numbers = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        ngrams = [(indices, indices, indices, numbers, numbers)]
        offset = 0
        for text, owner in zip(texts, owners, strict=True):
            length = min(self.ngram, len(text))
            is_informative = _windows(self._is_number[text], length) * 2 <= length
            informative = np.flatnonzero(is_informative)
            full_keys = self._keys(text, length)[informative] + np.uint64(length)
            first_keys = self._keys(text, self.first)[informative]
            ngrams.append(
                (
                    informative + offset,
                    np.full(len(informative), length),
                    np.full(len(informative), owner),
                    full_keys,
                    first_keys,
                )
            )
            offset += len(text)
        self._words = np.concatenate([*texts, np.zeros(0, np.int32)])
        starts, lengths, items, all_full_keys, all_first_keys = map(
            np.concatenate, zip(*ngrams, strict=True)
        )
        uncommon = self._uncommon(all_full_keys, items)
        # Sorted, so that `find` can look up a whole text by binary search.
        order = uncommon[np.argsort(all_first_keys[uncommon], kind="stable")]
        self._starts = starts[order]
        self._lengths = lengths[order]
        self._items = items[order]
        self._first = all_first_keys[order]

    def _uncommon(self, ngram_keys: np.ndarray, item_indices: np.ndarray) -> np.ndarray:
        """Return the indices of the n-grams that no more than `COMMON` items of one task have."""
        names = dict.fromkeys(name for name, _ in self.items)
        numbers = {name: number for number, name in enumerate(names)}
        task_of_item = np.array([numbers[name] for name, _ in self.items], np.uint64)
        # Counted per task: a key is mixed with its task, and each item counts once.
        tasks = task_of_item[item_indices]
        mixed = ngram_keys * np.uint64(0x9E3779B97F4A7C15) + tasks
        owned = np.unique(np.stack([mixed, item_indices.astype(np.uint64)]), axis=1)[0]
        keys, counts = np.unique(owned, return_counts=True)
        return np.flatnonzero(~np.isin(mixed, keys[counts > COMMON]))

    def _keys(self, text: np.ndarray, length: int) -> np.ndarray:
        """Hash every n-gram of `length` words of a text; equal words have equal hashes."""
        values, end = self._values[text], len(text) - length + 1
        keys = np.zeros(max(end, 0), np.uint64)
        # One multiplication for each word of an n-gram, for all n-grams at once.
        for offset in range(length if end > 0 else 0):
            keys = keys * np.uint64(0xD1342543DE82EF95) + values[offset : offset + end]
        return keys

    def find(self, text: str) -> tuple[str, str, str] | None:
        """Find task, item and n-gram of the first overlap of a text; None: no overlap."""
        numbers = np.array(
            [self.vocabulary.get(word, 0) for word in words(text)], np.int32
        )
        # A text shorter than the shortest n-gram overlaps with nothing.
        if len(numbers) < self.first or not len(self._first):
            return None
        keys = self._keys(numbers, self.first)
        rows = np.searchsorted(self._first, keys)
        ends = np.searchsorted(self._first, keys, "right")
        # A window with a word that no item has cannot match.
        is_in_vocabulary = _windows(numbers == 0, self.first) == 0
        for begin in np.flatnonzero(is_in_vocabulary & (rows < ends)):
            for row in range(rows[begin], ends[begin]):
                start, length = self._starts[row], self._lengths[row]
                ngram_words = self._words[start : start + length]
                # Hashes may collide, and only the first words were looked up.
                if np.array_equal(ngram_words, numbers[begin : begin + length]):
                    ngram = " ".join(self._names[word] for word in ngram_words)
                    return *self.items[self._items[row]], ngram
        return None


def words(text: str) -> list[str]:
    """Return the lower-case words of a text: runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


def _windows(flags: np.ndarray, length: int) -> np.ndarray:
    """Count how many of every `length` flags in a row are set."""
    total = np.concatenate([[0], np.cumsum(flags)])
    return total[length:] - total[:-length]


class Decontaminator:
    """Finds the examples that overlap with test items, and keeps the record of those
    that are left out.
    """

    def __init__(self, index: ItemIndex):
        self.index = index
        self.num_examples: Counter[str] = Counter()
        self._overlaps: dict[tuple[str, str], Overlap] = {}

    def find(self, source: Source, example: Mapping[str, Any]) -> Overlap | None:
        """Find the first overlap of an example of `source` with a test item, or None;
        records nothing.

        Raises: BadExample as `example_texts`.
        """
        texts = example_texts(example, columns_of(source))
        for text in texts:
            match = self.index.find(text)
            if match is not None:
                joined = "\n".join(texts)
                digest = hashlib.sha256(
                    joined.encode("utf-8", "surrogatepass")
                ).hexdigest()
                return Overlap(_name(source), digest, joined[:80], *match)
        return None

    def note(
        self, source: Source, num_examples: int, overlaps: Iterable[Mapping[str, str]]
    ) -> None:
        """Record the examples of `source` that were checked, and the overlaps in them,
        as they stand in the record of a shard.
        """
        self.num_examples[_name(source)] += num_examples
        for overlap in overlaps:
            key = overlap["source"], overlap["example_sha256"]
            self._overlaps[key] = Overlap(**overlap)

    def overlaps(self) -> list[dict[str, str]]:
        return [asdict(overlap) for overlap in self._overlaps.values()]

    def summary(self) -> dict[str, Any]:
        """Sum up for a manifest: test items and those that were not checked; examples
        left out, by task and by source.
        """
        by_source = Counter(overlap.source for overlap in self._overlaps.values())
        by_task = Counter(overlap.task for overlap in self._overlaps.values())
        # A plus before a Counter drops the tasks whose count is 0.
        too_short = +self.index.unchecked
        return {
            "ngram": self.index.ngram,
            "num_items": len(self.index.items),
            "num_items_too_short": dict(sorted(too_short.items())),
            "num_left_out": len(self._overlaps),
            "by_task": dict(sorted(by_task.items())),
            "by_source": {
                source: {"num_examples": number, "num_left_out": by_source[source]}
                for source, number in sorted(self.num_examples.items())
            },
        }


def _name(source: Source) -> str:
    return ":".join(part for part in (source.path, source.name, source.split) if part)

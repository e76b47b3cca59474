"""Define the operations on single digits and letters that the tiny tasks are made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One step: `code` is a Python expression of the argument, `wordings` say it in
    English.

    `{v}` stands for the argument, `{n}` for a number in `numbers` (first, last), `{c}`
    for one of `LETTERS`. `takes` and `gives` are one of int, bool, list (of int), str,
    letters (a list of str). `computed`: its value is asked for too.
    """

    takes: str
    gives: str
    code: str
    wordings: tuple[str, ...]
    numbers: tuple[int, int]
    computed: bool


# takes, gives, numbers, what is asked | code | wordings
# numbers: any (1 to 9), factor (2 to 9), length (2 to 4), or - for none and for letters;
# "value": questions ask for the value too, where it can be read off and need not be learnt by heart.
_TABLE = """
int  int     any    code  | {v} + {n}            | add {n} to {v} | increase {v} by {n}
int  int     any    code  | {v} - {n}            | subtract {n} from {v} | decrease {v} by {n}
int  int     any    code  | {n} - {v}            | subtract {v} from {n} | take {v} away from {n}
int  int     factor code  | {v} * {n}            | multiply {v} by {n} | scale {v} by {n}
int  int     factor code  | {v} // {n}           | divide {v} by {n} | say how often {n} fits into {v}
int  int     factor code | {v} % {n} | find the remainder of {v} by {n} | reduce {v} modulo {n}
int  int     any    value | max({v}, {n}) | return the larger of {v} and {n} | raise {v} to at least {n}
int  int     any    value | min({v}, {n}) | return the smaller of {v} and {n} | limit {v} to at most {n}
int  int     any    code | abs({v} - {n}) | find the distance of {v} and {n} | say how far {v} is from {n}
int  int     -      code  | {v} * {v}            | square {v} | multiply {v} by itself
int  bool    any    code  | {v} > {n} | check if {v} is greater than {n} | tell if {v} exceeds {n}
int  bool    any    code  | {v} < {n} | check if {v} is less than {n} | tell if {v} is below {n}
int  bool    factor code | {v} % {n} == 0 | check if {v} is divisible by {n} | tell if {n} divides {v}
int  bool    -      code  | {v} % 2 == 1         | check if {v} is odd | tell if {v} is an odd number
int  list    length code  | [{v}] * {n}          | make a list of {n} copies of {v} | list {v} {n} times
int  list    any    code  | [{v}, {n}]           | pair {v} with {n} | list {v} and {n}
list int     -      code  | sum({v})             | add up {v} | total {v}
list int     -      value | max({v})             | find the largest of {v} | return the maximum of {v}
list int     -      value | min({v})             | find the smallest of {v} | return the minimum of {v}
list int     -      code  | len({v})             | count the items of {v} | return the length of {v}
list int     -      value | {v}[0] | return the first of {v} | give the item at the start of {v}
list int     -      value | {v}[-1] | return the last of {v} | give the item at the end of {v}
list int     any    code  | {v}.count({n}) | count how often {n} occurs in {v} | count each {n} in {v}
list int     any    code  | sum(i > {n} for i in {v})   | count the items of {v} greater than {n} \
| say how many of {v} exceed {n}
list bool    any    value | {n} in {v}           | check if {v} contains {n} | tell if {n} is one of {v}
list bool    any    code  | all(i > {n} for i in {v})   | check if all of {v} are greater than {n} \
| tell if every item of {v} exceeds {n}
list list    any    code | [i + {n} for i in {v}] | add {n} to every item of {v} \
| increase all of {v} by {n}
list list    any    code  | [i - {n} for i in {v}]      | subtract {n} from every item of {v} \
| decrease all of {v} by {n}
list list    factor code | [i * {n} for i in {v}] | multiply every item of {v} by {n} \
| scale all of {v} by {n}
list list    any    code  | [i for i in {v} if i > {n}] | keep the items of {v} greater than {n} \
| drop all of {v} up to {n}
list list    any    code  | [i for i in {v} if i < {n}] | keep the items of {v} less than {n} \
| drop all of {v} from {n} up
list list    any    code  | [i for i in {v} if i != {n}] | remove every {n} from {v} \
| drop the items of {v} equal to {n}
list list    factor code  | [i for i in {v} if i % {n} == 0] | keep the items of {v} divisible by {n} \
| keep the multiples of {n} in {v}
list list    -      code  | sorted({v})          | sort {v} | put {v} in ascending order
list list    -      code | sorted({v})[::-1] | sort {v} in descending order | put the largest of {v} first
list list    -      code  | {v}[::-1]            | reverse {v} | turn {v} around
list list    length code  | {v}[:{n}] | take the first {n} of {v} | keep only {n} at the start of {v}
list list    length code  | {v}[-{n}:] | take the last {n} of {v} | keep only {n} at the end of {v}
list list    length code  | {v}[{n}:] | drop the first {n} of {v} | skip {n} at the start of {v}
list list    any    code  | {v} + [{n}]          | append {n} to {v} | put {n} at the end of {v}
list list    any    code  | [{n}] + {v}          | insert {n} before {v} | put {n} at the start of {v}
str  str     -      code  | {v}[::-1]            | reverse {v} | write {v} backwards
str  str     length code  | {v}[:{n}] | take the first {n} letters of {v} | cut {v} after {n} letters
str  str     length code  | {v}[{n}:] | drop the first {n} letters of {v} | skip {n} letters of {v}
str  str     length code  | {v}[-{n}:] | take the last {n} letters of {v} \
| keep the {n} letters that end {v}
str  str     length code  | {v} * {n}            | repeat {v} {n} times | join {n} copies of {v}
str  str     -      code  | {v} + '{c}'          | append {c} to {v} | put {c} after {v}
str  str     -      code  | '{c}' + {v}          | put {c} before {v} | start {v} with an extra {c}
str  str     -      code  | {v}.replace('{c}', '') | remove every {c} from {v} \
| delete the letter {c} in {v}
str  str     -      code  | {v}.lower()          | put {v} in lower case | make all letters of {v} small
str  int     -      code  | len({v})             | return the length of {v} | count the letters of {v}
str  int     -      code  | {v}.count('{c}') | count how often {c} occurs in {v} | count each {c} in {v}
str  int     -      code  | {v}.find('{c}')      | find the place of {c} in {v} | say where {c} is in {v}
str  bool    -      value | '{c}' in {v}         | check if {v} contains {c} | tell if {c} occurs in {v}
str  bool    -      value | {v}.startswith('{c}') | check if {v} starts with {c} \
| tell if {v} begins with {c}
str  letters -      code  | list({v})            | list the letters of {v} | split {v} into letters
"""


_NUMBERS = {"any": (1, 9), "factor": (2, 9), "length": (2, 4), "-": (0, 0)}


def _parse(line: str) -> Operation:
    head, code, *wordings = (cell.strip() for cell in line.split("|"))
    takes, gives, numbers, answer = head.split()
    return Operation(
        takes, gives, code, tuple(wordings), _NUMBERS[numbers], answer == "value"
    )


OPERATIONS = tuple(_parse(line) for line in _TABLE.strip().splitlines())

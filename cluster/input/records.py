"""Cutting text files into records, unparsed: lines, elements of JSON arrays, CSV records."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from cluster.errors import UserError
from cluster.input.files import MAX_RECORD_BYTES, InputFile

_BUNCH_BYTES = 1 << 20
_MAX_CSV_BYTES = 1 << 20
"""A quote that is not closed within this much is a broken record, not the rest of the file."""
_TO_CLOSING_QUOTE = re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
_TO_COMMA = re.compile(rb"[^,]*(,?)")
_BLANKS = re.compile(r"[ \t\r\n]*")


class CsvPart(NamedTuple):
    """Records of one CSV file, and its header line."""

    header: bytes
    records: list[bytes]


def line_records(file: InputFile) -> Iterator[list[bytes]]:
    """Lines that hold more than white space: a blank line is no row in any text format."""
    for lines in file.lines():
        # isspace stops at the first other byte, so this costs little even for long lines.
        kept = [line for line in lines if line and not line.isspace()]
        if kept:
            yield kept


def json_records(file: InputFile) -> Iterator[list[bytes]]:
    """The rows of a ``.json`` file, each on one line: elements of its array, or its lines if it is JSON Lines."""
    first = next((lines[0].lstrip() for lines in line_records(file)), None)
    if first is None:
        return iter(())
    if first.startswith(b"["):
        return _array_elements(file)
    try:
        is_lines = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_lines = False
    if not is_lines:
        raise UserError(f"{file.name} holds neither a JSON array nor one JSON object a line.")
    return line_records(file)


def csv_records(file: InputFile) -> Iterator[CsvPart]:
    """The records of a CSV file as they stand. A quoted field may span lines; blank lines are no rows."""
    header: bytes | None = None
    for records in _csv_bunches(file):
        if header is None:
            header, *records = records
        if records:
            yield CsvPart(header, records)


def csv_header(file: InputFile) -> list[str]:
    """Column names; none for an empty file. Raises ``UserError`` if one is empty, repeated or not text."""
    first = next(_csv_bunches(file), None)
    if first is None:
        return []
    try:
        names = header_names(first[0])
    except (ValueError, csv.Error) as error:
        raise UserError(f"The header of {file.name} is not valid CSV: {error}.") from None
    for position, name in enumerate(names):
        if not name:
            raise UserError(f"Column {position + 1} of {file.name} has no name.")
        if name in names[:position]:
            raise UserError(f"{file.name} has two columns named {name!r}.")
    return names


def header_names(header: bytes) -> list[str]:
    """Column names in a header that ``csv_header`` has accepted."""
    return next(csv.reader(header.decode().splitlines(keepends=True), strict=True))


def _csv_bunches(file: InputFile) -> Iterator[list[bytes]]:
    """Whole records, the header first, in bunches that are never empty."""
    opened: list[bytes] = []  # lines of a record whose quote is still open
    for lines in file.lines():
        records = list(_join_quoted(deque(lines), opened))
        if records:
            yield records
    while opened:  # the file ends inside a quote: that line is a record of its own, those behind it start afresh
        first, *rest = opened
        opened = []
        yield [first, *_join_quoted(deque(rest), opened)]


def _join_quoted(lines: deque[bytes], opened: list[bytes]) -> Iterator[bytes]:
    """Records made of ``lines``; what is still inside quotes at the end is left in ``opened``."""
    size = sum(map(len, opened))
    while lines:
        line = lines.popleft()
        if (b'"' in line or opened) and ends_in_quotes(line, inside=bool(opened)):
            opened.append(line)
            size += len(line)
            if size > _MAX_CSV_BYTES:
                yield opened[0]
                lines.extendleft(reversed(opened[1:]))
                opened.clear()
        elif opened:
            yield b"\n".join([*opened, line])
            opened.clear()
        elif not (line == b"" or line.isspace()):
            yield line
        if not opened:
            size = 0


def ends_in_quotes(line: bytes, inside: bool) -> bool:
    """Whether a quoted field is open at the end of the line. A quote opens a field only at its start."""
    position = 0
    while True:
        if not inside and line[position : position + 1] == b'"':
            inside, position = True, position + 1
        if inside:
            closing = _TO_CLOSING_QUOTE.match(line, position)
            if closing is None:
                return True
            inside, position = False, closing.end()
        field = _TO_COMMA.match(line, position)
        assert field is not None  # it matches anything
        if not field[1]:
            return False
        position = field.end()


def _array_elements(file: InputFile) -> Iterator[list[bytes]]:
    """Source text of every element of a JSON array, on one line each.

    The array must be well formed, for behind an error no element can be told from another.
    """
    window = _Window(file)
    window.expect("[")
    elements: list[bytes] = []
    size = 0
    more = window.peek() != "]"
    while more:
        # A line feed inside an element is white space between its tokens: JSON strings cannot hold one.
        text = window.element().encode("utf-8", "surrogateescape")
        elements.append(text.replace(b"\n", b" "))
        size += len(text)
        if size > _BUNCH_BYTES:
            yield elements
            elements, size = [], 0
        more = window.peek() == ","
        window.expect("," if more else "]")
    if elements:
        yield elements


class _Window:
    """The part of a JSON text that has been read and not yet consumed."""

    def __init__(self, file: InputFile) -> None:
        self._name = file.name
        self._blocks = _text_blocks(file)
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._position, self._consumed = "", 0, 0

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._position)
            assert blanks is not None
            self._position = blanks.end()
            if self._position < len(self._text) or not self._grow():
                return self._text[self._position : self._position + 1]

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._broken()
        self._position += 1

    def element(self) -> str:
        """Source text of the JSON value that starts here."""
        self.peek()
        while True:
            try:
                _, end = self._decode(self._text, self._position)
            except (ValueError, RecursionError):
                end = len(self._text)
            if end < len(self._text):  # else a number might go on in the next block
                text = self._text[self._position : end]
                self._position = end
                return text
            if len(self._text) - self._position > MAX_RECORD_BYTES or not self._grow():
                raise self._broken()

    def _grow(self) -> bool:
        """Read on, at least doubling what is unconsumed, so that a long element is not scanned too often."""
        unconsumed = self._text[self._position :]
        self._consumed += self._position
        parts, size = [unconsumed], 0
        for block in self._blocks:
            parts.append(block)
            size += len(block)
            if size > len(unconsumed):
                break
        self._text, self._position = "".join(parts), 0
        return size > 0

    def _broken(self) -> UserError:
        return UserError(
            f"{self._name} is not a valid JSON array near character {self._consumed + self._position + 1}."
        )


def _text_blocks(file: InputFile) -> Iterator[str]:
    """The file as text; bytes that are not UTF-8 survive as surrogates, to be found again in their own row."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in file.blocks():
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)

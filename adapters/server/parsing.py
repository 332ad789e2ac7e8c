"""`parse`: JSON as clients send it, in a time that has a bound."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec

from corogen.adapters.server.errors import ApiError

#: lists, objects and fields of one body. Texts and numbers cost a parser little; these cost it a second for 16 MiB,
#: in one call that lets no other thread run
MAX_NODES = 2**18

_NODES = (b"[", b"{", b":")
_node_or_text = re.compile(rb'[\[{:]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def parse(data: bytes) -> Any:
    """The value of a JSON text; in the encodings and with the odd numbers that Python's `json` takes, too.

    Raises:
        ApiError: it is no JSON, or holds more nodes than any request needs.
    """
    if _has_more_nodes(data, MAX_NODES):
        raise ApiError(400, f"the body holds more than {MAX_NODES} lists, objects and fields", code="too_many_values")
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):  # or something that only `json` knows, or says better
        return _parse_odd(data)


def _parse_odd(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise _no_json("too many values within each other") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg}, at character {error.pos}") from None
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is no {error.encoding}") from None
    except ValueError as error:  # a number with thousands of digits
        raise _no_json(str(error).partition(";")[0]) from None


def _no_json(words: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {words}", code="invalid_json")


def _has_more_nodes(data: bytes, bound: int) -> bool:
    """Whether more than `bound` of the characters that make nodes stand outside of texts."""
    if sum(map(data.count, _NODES)) <= bound:
        return False
    nodes = (match for match in _node_or_text.finditer(data) if match[0] in _NODES)
    return next(itertools.islice(nodes, bound, None), None) is not None

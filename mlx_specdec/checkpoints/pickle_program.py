"""Follow a pickle as data. What a pickle is, a program for Python's unpickler, never runs: its opcodes are read one by
one, and where it would import or call something there is only a note of it."""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple


class Global(NamedTuple):
    """Something that the pickle names, to be imported by whoever runs it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call(NamedTuple):
    """A call that the pickle asks for."""

    function: Global
    arguments: tuple


class Persistent(NamedTuple):
    """What the pickle leaves to its surroundings to look up."""

    key: Any


ORDERED_DICT = Global("collections", "OrderedDict")
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def follow(data: bytes, check: Callable[[Global], None]) -> Any:
    """What the pickle `data` describes, made of dicts, lists, tuples, strings, numbers and the notes above.

    `check` is given every name as it comes and raises if it is not to be there. Raises ValueError for anything else
    that a pickle of tensors does not hold.
    """
    machine = _Machine(check)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.result()
        machine.step(opcode.name, argument)
    raise ValueError("it has no end")


class _Machine:
    def __init__(self, check: Callable[[Global], None]):
        self._check = check
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise ValueError("it does not end with one value")
        return self._pop()

    def step(self, name: str, argument: Any) -> None:  # noqa: PLR0912  # a case for each opcode
        push = self._stack.append
        if name in ("PROTO", "FRAME"):
            pass
        elif name in _VALUES:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top(object)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top(object)
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError("it refers to what it never held")
            push(self._memo[argument])
        elif name == "MARK":
            push(_MARK)
        elif name == "EMPTY_DICT":
            push({})
        elif name == "EMPTY_LIST":
            push([])
        elif name == "TUPLE":
            push(tuple(self._to_mark()))
        elif name in _TUPLES:
            push(tuple([self._pop() for _ in range(_TUPLES[name])][::-1]))
        elif name in ("APPEND", "APPENDS"):
            items = [self._pop()] if name == "APPEND" else self._to_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._to_mark()
            self._set(items)
        elif name == "GLOBAL":
            self._name(*argument.split(" ", 1))
        elif name == "STACK_GLOBAL":
            last, first = self._pop(), self._pop()
            self._name(first, last)
        elif name == "BINPERSID":
            push(Persistent(self._pop()))
        elif name == "REDUCE":
            self._call()
        elif name == "BUILD":
            self._pop()  # attributes of an OrderedDict, which PyTorch keeps versions of modules in
            self._top(dict)
        else:
            raise ValueError(f"it holds the opcode {name}, which tensors do not need")

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it takes more than it has")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        """The value on top, which must be of a kind."""
        if not self._stack or self._stack[-1] is _MARK or not isinstance(self._stack[-1], kind):
            raise ValueError(f"it expects {kind.__name__} where there is none")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise ValueError("it takes more than it has")

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
            raise ValueError("it has a dict whose keys are no strings")
        target.update(zip(keys, values, strict=True))

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names something that is no name")
        named = Global(module, name)
        self._check(named)
        self._stack.append(named)

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is no name")
        empty = function == ORDERED_DICT and not arguments
        self._stack.append({} if empty else Call(function, arguments))

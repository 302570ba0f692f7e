"""What stands in one process for an object or a class of another: it asks there for everything."""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_ITSELF = (  # questions that an object answers without anything of the asker's
    *("len", "iter", "next", "bool", "str", "repr", "hash", "abs", "int", "float", "complex"),
    *("index", "neg", "pos", "invert", "reversed", "enter", "trunc", "floor", "ceil"),
)


class Handle:
    """Which object of the other process it is.

    Attributes:
        exchange: leads there.
        number: of the object there.
        is_constructed: whether this process has made the object, by calling its class.
    """

    __slots__ = ("exchange", "is_constructed", "number")

    def __init__(self, exchange: Any, number: int, is_constructed: bool = False) -> None:
        self.exchange = exchange
        self.number = number
        self.is_constructed = is_constructed


def handle_of(thing: Any) -> Handle | None:
    """The handle of what stands for an object, None of anything else."""
    if isinstance(type(thing), RemoteClass) or type(thing) is RemoteClass:
        return object.__getattribute__(thing, "__dict__").get("_remote")  # type: ignore[no-any-return]
    return None


def is_same(left: Any, right: Any) -> bool:
    """Whether they are one object, here or there."""
    handle, other = handle_of(left), handle_of(right)
    return left is right or bool(handle and other and handle.number == other.number)


class RemoteClass(type):
    """Stands for a class. What is made of it here are handles only."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        made = _ask(cls, "call", *arguments, **options)
        handle = handle_of(made)
        if handle is None or not isinstance(made, RemoteObject):
            return made
        constructed = object.__new__(type(made))
        exchange = handle.exchange
        is_named = exchange.is_class_name(cls.__name__)
        attach(constructed, Handle(exchange, handle.number, is_constructed=is_named))
        return constructed

    def __getattr__(cls, name: str) -> Any:
        return get_attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _ask(cls, "setattr", name, value)

    def __instancecheck__(cls, thing: Any) -> bool:
        return cls.__subclasscheck__(type(thing))

    def __subclasscheck__(cls, kind: Any) -> bool:
        if type.__subclasscheck__(cls, kind):
            return True
        handle = handle_of(cls)
        return handle is not None and handle.number in vars(kind).get("_ancestors", ())

    def __iter__(cls) -> Any:
        return _ask(cls, "iter")

    def __len__(cls) -> Any:
        return _ask(cls, "len")

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return _ask(cls, "getitem", key)

    def __contains__(cls, item: Any) -> bool:
        return _contains(cls, item)


class RemoteObject(metaclass=RemoteClass):
    """Stands for an object."""

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _ask(self, "call", *arguments, **options)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

    def __contains__(self, item: Any) -> bool:
        return _contains(self, item)

    def __format__(self, form: str) -> Any:
        return _ask(self, "format", form)

    def __round__(self, *digits: Any) -> Any:
        return _ask(self, "round", *digits)

    def __exit__(self, kind: Any, error: Any, frames: Any) -> bool:
        """An object cannot make a failed assert undone."""
        is_over = bool(_ask(self, "exit", error))
        return is_over and isinstance(error, Exception) and not isinstance(error, AssertionError)

    def __await__(self) -> Any:
        yield from ()
        return _ask(self, "await")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of another process cannot be copied here")


class RemoteData:
    """A mixin of plain data whose class is derived from a plain type: it compares, and has a
    length and items, as the plain type; what that does not have is asked for."""

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name)

    def __repr__(self) -> Any:
        return _ask(self, "repr")

    def __str__(self) -> Any:
        return _ask(self, "str")


class RemoteError:
    """A mixin of exceptions whose class is of the other process."""

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name)

    def __str__(self) -> Any:
        return _ask(self, "str")


def attach(thing: Any, handle: Handle) -> None:
    """Makes it stand for the handle's object."""
    object.__getattribute__(thing, "__dict__")["_remote"] = handle


def get_attribute(thing: Any, name: str) -> Any:
    """An attribute of the object there. Of special names, those that only describe."""
    if name.startswith("__") and name not in (
        "__name__",
        "__qualname__",
        "__wrapped__",
        "__cause__",
    ):
        raise AttributeError(name)
    return handle_of(thing).exchange.get_attribute(thing, name)  # type: ignore[union-attr]


def _ask(thing: Any, operation: str, *arguments: Any, **options: Any) -> Any:
    return handle_of(thing).exchange.ask(operation, [thing, *arguments], options)  # type: ignore


def _may(thing: Any, operation: str, others: tuple[Any, ...]) -> bool:
    return handle_of(thing).exchange.may_ask(operation, thing, others)  # type: ignore


def _contains(thing: Any, item: Any) -> bool:
    if not _may(thing, "contains", (item,)):
        raise TypeError("an object that the test has not made says nothing of the test's data")
    return bool(_ask(thing, "contains", item))


def _add_operations() -> None:
    """Methods that do nothing but ask."""

    def unary(operation: str) -> Any:
        return lambda self: _ask(self, operation)

    def binary(operation: str) -> Any:
        def ask(self: Any, other: Any) -> Any:
            return (
                _ask(self, operation, other) if _may(self, operation, (other,)) else NotImplemented
            )

        return ask

    def reflected(operation: str) -> Any:
        def ask(self: Any, other: Any) -> Any:
            if not _may(self, operation, (other,)):
                return NotImplemented
            return handle_of(self).exchange.ask(operation, [other, self], {})  # type: ignore

        return ask

    set_method = type.__setattr__
    for name in _OF_ITSELF:
        set_method(RemoteObject, f"__{name}__", unary(name))
    for name in (*COMPARISONS, *ARITHMETIC):
        set_method(RemoteObject, f"__{name}__", binary(name))
    for name in ARITHMETIC:
        set_method(RemoteObject, f"__r{name}__", reflected(name))


_add_operations()

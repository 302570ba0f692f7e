"""Proxies in one process of objects and classes of another: they ask there for everything."""

from __future__ import annotations

from .data_codec import CHANGING

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_CLASSES = ("iter", "len", "getitem", "contains", "setattr", "delattr")
_OF_OBJECTS = (
    *("call", "setitem", "delitem", "format", "round", "next", "bool", "str", "repr"),
    *("hash", "abs", "int", "float", "complex", "index", "neg", "pos", "invert"),
    *("reversed", "enter", "trunc", "floor", "ceil", *COMPARISONS, *ARITHMETIC),
)
_DESCRIBING = ("__name__", "__qualname__", "__wrapped__", "__cause__")


class ObjectHandle:
    """A handle of an object of the other process.

    Attributes:
        exchange: leads there.
        number: of the object there.
        is_constructed: whether this process has made the object, by calling its class.
        is_class: whether it is a class that this process calls in order to make objects.
    """

    __slots__ = ("exchange", "is_class", "is_constructed", "number")

    def __init__(self, exchange: Any, number: int, is_constructed: bool = False) -> None:
        self.exchange = exchange
        self.number = number
        self.is_constructed = is_constructed
        self.is_class = False


def handle_of(thing: Any) -> ObjectHandle | None:
    """Return the handle of a proxy, None of anything else."""
    handle: ObjectHandle | None = None
    if isinstance(type(thing), RemoteClass) or type(thing) is RemoteClass:
        handle = object.__getattribute__(thing, "__dict__").get("_remote")
    return handle


def is_same(left: Any, right: Any) -> bool:
    """Return whether they are one object, here or there."""
    handle, other = handle_of(left), handle_of(right)
    return left is right or bool(handle and other and handle.number == other.number)


def attach(thing: Any, handle: ObjectHandle) -> Any:
    """Make a thing the proxy of the handle's object, and return it."""
    object.__getattribute__(thing, "__dict__")["_remote"] = handle
    return thing


def as_constructed(thing: Any) -> Any:
    """Return an object as one that this process has made; anything else as it is."""
    if not isinstance(thing, RemoteObject):
        return thing
    handle: Any = handle_of(thing)
    made = object.__new__(type(thing))
    return attach(made, ObjectHandle(handle.exchange, handle.number, is_constructed=True))


def as_function(kind: Any) -> Any:
    """Return a class as something that is called and makes nothing here."""
    handle: Any = handle_of(kind)
    names = {n: vars(kind)[n] for n in ("_ancestors", "__module__")}
    names["_remote"] = ObjectHandle(handle.exchange, handle.number)
    return type.__call__(RemoteClass, kind.__name__, kind.__bases__, names)


def get_attribute(thing: Any, name: str) -> Any:
    """Return an attribute of the object there. Of special names, those that only describe."""
    if name.startswith("__") and name not in _DESCRIBING:
        raise AttributeError(name)
    return _ask(thing, "getattr", name)


def _ask(thing: Any, operation: str, *arguments: Any, **options: Any) -> Any:
    handle: Any = handle_of(thing)
    return handle.exchange.ask(operation, [thing, *arguments], options)


def _asking(operation: str, is_reflected: bool = False) -> Any:
    """Return a method that does nothing but ask."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        given = [*arguments, self] if is_reflected else [self, *arguments]
        handle: Any = handle_of(self)
        return handle.exchange.ask(operation, given, options)

    return method


class RemoteClass(type):
    """Stands for a class. What it makes is made there, and here is only a handle."""

    __getattr__ = get_attribute

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        made = _ask(cls, "call", *arguments, **options)
        handle, own = handle_of(made), handle_of(cls)
        if handle is None or own is None or not own.is_class:
            return made  # a function, or a class that passes for one
        kind = type(made)
        if issubclass(kind, RemoteData):
            if not issubclass(kind, CHANGING):
                return made
            names = {"_ancestors": vars(kind)["_ancestors"], "__module__": "__main__"}
            kind = type.__call__(RemoteClass, kind.__name__, (RemoteObject,), names)
        exchange, number = handle.exchange, handle.number
        return attach(object.__new__(kind), ObjectHandle(exchange, number, is_constructed=True))

    def __instancecheck__(cls, thing: Any) -> bool:
        return cls.__subclasscheck__(type(thing))

    def __subclasscheck__(cls, kind: Any) -> bool:
        if type.__subclasscheck__(cls, kind):
            return True
        handle = handle_of(cls)
        return handle is not None and handle.number in vars(kind).get("_ancestors", ())

    def __bool__(cls) -> bool:
        return True


class RemoteObject(metaclass=RemoteClass):
    """Stands for an object."""

    __getattr__ = get_attribute

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

    __getattr__ = get_attribute
    __repr__ = _asking("repr")
    __str__ = _asking("str")


class RemoteError:
    """A mixin of exceptions whose class is of the other process."""

    __getattr__ = get_attribute
    __str__ = _asking("str")


for _name in _OF_CLASSES:
    setattr(RemoteClass, f"__{_name}__", _asking(_name))
for _name in (*_OF_CLASSES, *_OF_OBJECTS):
    type.__setattr__(RemoteObject, f"__{_name}__", _asking(_name))
for _name in ARITHMETIC:
    type.__setattr__(RemoteObject, f"__r{_name}__", _asking(_name, is_reflected=True))

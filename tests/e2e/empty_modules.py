"""Imports a package without what it depends on: a module that is not installed becomes an empty one,
whose names are all one class that can be called, subclassed and subscripted, and does nothing.

So a trainer's client runs without PyTorch, Ray and the like, as far as it does not use them.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types


class Everything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __getitem__(cls, _):
        return Nothing

    def __or__(cls, _):
        return Nothing

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


class Nothing(metaclass=Everything):
    def __new__(cls, *args, **_):
        """A decorator gives what it decorates."""
        return args[0] if len(args) == 1 and callable(args[0]) else super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __call__(self, *args, **_):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


NEWEST = "999.0"


class EmptyModule(types.ModuleType):
    __path__ = ()
    __version__ = NEWEST

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class EmptyDistribution(importlib.metadata.Distribution):
    def __init__(self, name):
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {NEWEST}\n"

    def read_text(self, name):
        return self.text if name == "METADATA" else None

    def locate_file(self, path):
        return path


class Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    def __init__(self, keep):
        self.keep = keep

    def find_distributions(self, context):
        return [EmptyDistribution(context.name)] if context.name else []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.keep or name.partition(".")[0] in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def empty_what_is_missing(*keep):
    """The packages `keep` are never emptied: that a module of theirs is missing is an error."""
    sys.meta_path.append(Finder(keep))

"""Sections with variants: the value of an option (the selector) chooses a class with further
options.

The selector is an option such as `old_logps.route`. A variant is a class that sets the selector to
its own name. It is in a file of the section's package, in an entry point of another distribution,
or in another imported file, which can be imported without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from unstale.config.checks import (
    ConfigError,
    OneOf,
    Section,
    base_of,
    option_types,
    section_name,
    unknown_option,
)
from unstale.config.plugins import Plugins, added_names, modules


class VariantSection(Section):
    """A section in which an option, the selector, chooses a subclass with further options.

    The constructor returns an instance of that subclass. An example of a selector is `route`.
    """

    abstract: ClassVar[bool] = True

    package: ClassVar[str]
    """The package whose modules have the variants."""
    group: ClassVar[str]
    """The group of entry points with which other distributions add variants."""
    registered: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        """Register a subclass as a variant if it sets the selector, under the selector's value.

        Raises ValueError if a class of another module has registered the same value.
        """
        name = vars(cls).get(cls.selector)
        if name is None or "registered" in vars(cls):
            return
        if (known := cls.registered.setdefault(name, cls)).__module__ != cls.__module__:
            raise ValueError(f"{cls.selector} {name} is registered already, by {known.__module__}")
        cls.registered[name] = cls

    @classmethod
    def variants_by_name(cls, *, added: bool = True) -> Mapping[str, Any]:
        """Return the class of each variant, by its name, in the order of registration.

        With `added`, entry points of other distributions are included.
        """
        _import_variants(base_of(cls), added)
        return cls.registered

    @classmethod
    def own_options(cls) -> dict[str, set[str]]:
        """Return the options that some variants lack, by the name of each variant that has them.

        A variant of another distribution that cannot be imported has an empty set.
        """
        common = set(option_types(base_of(cls)))
        broken: dict[str, set[str]] = {name: set() for name in added_names(cls.group)}
        return broken | {
            name: {option.name for option in fields(variant)} - common
            for name, variant in cls.variants_by_name().items()
        }

    @classmethod
    def chosen_class(cls, name: str, options: Mapping[str, Any]) -> Any:
        """Return the class of the variant `name`.

        "" names the default variant if `cls` is the section's base class, otherwise `cls` itself.
        Raises `ConfigError` for an unknown variant, or for an option in `options` that the variant
        lacks.
        """
        section, own = section_name(cls), getattr(cls, cls.selector)
        chosen: Any = cls
        if cls is base_of(cls):
            OneOf(cls.own_options).check(f"{section}.{cls.selector}", name or own)
            chosen = cls.variants_by_name().get(name or own)
            chosen = chosen or Plugins(cls.group, cls).load(name or own)
        elif name and name != own:
            raise ConfigError(
                f"the {cls.selector} is {own}: change it with with_options({cls.selector}={name!r})"
            )
        known = [option.name for option in fields(chosen)]
        for option in options:
            if option in known:
                continue
            if owners := cls.readers(option):
                raise ConfigError(
                    f"{section}.{option} is an option of {', '.join(owners)}; "
                    f"{section}.{cls.selector} is {getattr(chosen, cls.selector)}"
                )
            raise ConfigError(unknown_option(f"{section}.{option}"))
        return chosen

    @classmethod
    def classes(cls) -> "Sequence[type[Any]]":
        return [base_of(cls), *cls.variants_by_name().values()]

    def changed(self) -> dict[str, Any]:
        """Return the options besides the selector that differ from their defaults, with their
        values.
        """
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.name != self.selector and getattr(self, option.name) != option.default
        }

    def with_options(self, **changes: Any) -> Any:
        """Return a copy of this section with `changes` of its options. The variant may change, too.

        An option that the new variant lacks is dropped if it has its default, or if it is not in
        `changes` and `unread` returns it. Otherwise `ConfigError` is raised.
        """
        values = {self.selector: getattr(self, self.selector), **self.changed(), **changes}
        unread = set(self.unread(values)) - changes.keys()
        variants = self.variants_by_name()
        defaults = [(each.name, each.default) for cls in variants.values() for each in fields(cls)]
        base = base_of(type(self))
        known = set(option_types(variants.get(values[self.selector], base)))
        return base(
            **{
                name: value
                for name, value in values.items()
                if name not in unread and (name in known or (name, value) not in defaults)
            }
        )

    def __str__(self) -> str:
        """Return the name of the variant and the options that differ from their defaults.

        >>> from unstale.config import OldLogpsConfig
        >>> print(OldLogpsConfig(route="ewma_prox", beta=0.75))
        ewma_prox beta=0.75
        """
        changed = (f"{name}={value}" for name, value in self.changed().items())
        return " ".join([getattr(self, self.selector), *changed])


@cache
def _import_variants(base: type[VariantSection], added: bool) -> None:
    """Import all variants, which registers them.

    With `added`, also those of other distributions.
    """
    for module in modules(base.package).values():
        import_module(module)
    known = base.registered.items()
    shipped = [name for name, each in known if each.__module__.startswith("unstale.")]
    if added:
        Plugins(base.group, base).load_all(shipped)

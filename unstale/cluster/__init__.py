"""The part of a run that uses other machines, by Ray. Only this package imports ray."""

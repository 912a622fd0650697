"""Commands: dataclass -> flags, exit codes, provenance guard. Imports no torch."""


class UserError(ValueError):
    """Something the user can mend; the message says how, the command exits with code 2."""

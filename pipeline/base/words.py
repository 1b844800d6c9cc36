"""Small things of language. No torch."""


def counted(number: int, name: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"

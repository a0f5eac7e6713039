"""Other libraries' errors in one line."""

import re

# Google answers a refusal over many lines, JSON or XML, with the reason somewhere in them.
_ANSWER = re.compile(
    r"""with body '.*?(?:"message": "|<Message>)(.*?)(?:"|</).*?'\s*(?=when|$)""", re.DOTALL
)


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 1,000 characters."""
    said = str(getattr(error, "message", "") or error)  # TensorFlow's str() adds op names
    text = _ANSWER.sub(r"(\1) ", said).strip() or type(error).__name__
    return text.splitlines()[0].split(" [tensorstore_spec")[0][:1000]

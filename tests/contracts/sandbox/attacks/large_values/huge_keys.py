"""Returns a dict whose keys are integers too long to be written as text.

tests: calls source
task: dict
"""


def double(n):
    return {10**5000: n}

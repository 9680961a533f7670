"""Generates test cases of request signatures with Slack's own SDK for Python: services/slack/src/signature/cases.json.

With --check it only compares: the generator is seeded, so that the same SDK gives the same results. `./dev slack` does that.
"""

import json
import random
import sys
from pathlib import Path

from slack_sdk.signature import SignatureVerifier

SEED = 7
COUNT = 240
CASES = Path(__file__).parents[2] / "services/slack/src/signature/cases.json"
# HMAC treats secrets longer than its block of 64 bytes differently.
LENGTHS = [1, 32, 32, 32, 63, 64, 65, 100]
# Around the five minutes that Slack allows, and far from the limit.
SKEWS = [0, 0, 1, -1, 299, -299, 300, -300, 301, -301]
LETTERS = 'abcdefghijklmnopqrstuvwxyzABC0123456789 &=%+,:"{}\näöü€😀'


class Clock:
    def __init__(self, now):
        self.second = now

    def now(self):
        return self.second


def changed(chance, timestamp, signature, body):
    """A tampered request; half of them stay unchanged."""
    kind = chance.randrange(18)
    if kind == 0:
        return timestamp, signature[3:], body
    if kind == 1:
        return timestamp, signature[:-1], body
    if kind == 2:
        return timestamp, signature.upper(), body
    if kind == 3:
        return timestamp, signature, body + " "
    if kind == 4:
        return timestamp, signature, body[1:]
    if kind == 5:
        place = chance.randrange(3, len(signature))
        other = chance.choice([digit for digit in "0123456789abcdef" if digit != signature[place]])
        return timestamp, signature[:place] + other + signature[place + 1 :], body
    if kind == 6:
        return chance.choice(["", "soon", str(int(timestamp) + 1)]), signature, body
    if kind == 7:
        return timestamp, chance.choice(["", "v0=", "v0"]), body
    return timestamp, signature, body


def is_accepted(verifier, timestamp, signature, body):
    """Whether the SDK accepts it. An error because of an invalid number means no."""
    headers = {"X-Slack-Request-Timestamp": timestamp, "X-Slack-Signature": signature}
    try:
        return verifier.is_valid_request(body.encode(), headers)
    except ValueError:
        return False


def cases():
    chance = random.Random(SEED)
    for _ in range(COUNT):
        secret = "".join(chance.choice("0123456789abcdef") for _ in range(chance.choice(LENGTHS)))
        body = "".join(chance.choice(LETTERS) for _ in range(chance.choice([0, 1, 20, 20, 200])))
        now = chance.randrange(1_400_000_000, 2_000_000_000)
        skew = chance.choice(SKEWS) if chance.randrange(5) else chance.randrange(-4_000, 4_000)
        verifier = SignatureVerifier(secret, Clock(now))
        timestamp = str(now - skew)
        signature = verifier.generate_signature(timestamp=timestamp, body=body)
        timestamp, signature, body = changed(chance, timestamp, signature, body)
        yield [secret, now, timestamp, signature, body, is_accepted(verifier, timestamp, signature, body)]


def main():
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases())
    written = f"[\n{lines}\n]\n"
    if sys.argv[1:] == ["--check"]:
        if CASES.read_text(encoding="utf-8") != written:
            sys.exit(f"{CASES} is not what {Path(__file__).name} writes")
    elif not sys.argv[1:]:
        CASES.write_text(written, encoding="utf-8")
    else:
        sys.exit(f"usage: {Path(__file__).name} [--check]")


if __name__ == "__main__":
    main()

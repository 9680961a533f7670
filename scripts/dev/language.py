"""Checks names and prose against docs/GLOSSARY.md: `./dev lint` runs it.

It refuses names that say nothing by themselves, British spelling, and comments and paragraphs wider than
100 columns. Tables, links, code blocks and generated files are exempt from the width.
"""

import pathlib
import re
import subprocess
import sys

WIDTH = 100

# Participles, prepositions and pronouns. They need a noun or a verb: `FoundTool`, `is_known`.
TYPES = (
    "About Above Admitted Ahead Announced Asked Asking Away Awaited Begun Below Beside Called Came Carried "
    "Changed Checked Claimed Closed Commanded Committed Counted Cut Decided Does Done Edited Ended Ending "
    "Ends Exceeded Executed Fetched Forwarded Found Fresh Gathered Given Gone Grown Handed Hashed Heard "
    "Held Hidden Joined Judged Kept Keyed Known Lately Left Listed Loaded Looked Looks Made Masked "
    "May Means Metered Missed Named Noted Now Of Only Opened Outlined Over Packed Passed Passing Past "
    "Placed Posted Prepared Presented Pressed Put Recorded Remembered Removed Rendered Repeated Requested "
    "Resealed Rewound Routed Said Saved Say Searched Sealed Seen Sending Sent Settled Shed Shown Spent "
    "Standing Stored Stopped Taken Taking Talk Thrown Told Trouble Trying Unread Unseen Used Wait Waited "
    "Waits Wanted Want Watched What Whereabouts Who Whose Why Wish Written Wrong"
).split()
FUNCTIONS = (
    "about above again ahead along among around asked at away because before below beneath beside by came "
    "does done for_it given go_on gone has_told hear heard held ill kept know known left look look_at "
    "made nobody nowhere of on one only over past said say see seen sent settled shown some somebody such "
    "taken tell tell_left theirs there told under until_it upon void wanted well went whatever where "
    "whereabouts who whole whose why wish without words"
).split()
CONSTANTS = "AGAIN FRESH GLANCE GONE HELD KEPT KNOWN LOOK LOOKS PATIENCE PAUSE SAID TAKEN TOLD WANTED WHAT WAITS".split()
BRITISH = re.compile(
    r"\b(\w*(?:organis|authoris|optimis|serialis|initialis|recognis|normalis|summaris|synchronis|minimis|"
    r"maximis|specialis|generalis|categoris|prioritis|finalis|utilis|capitalis|tokenis|randomis)(?:e|es|ed|er|ers|ing|ation|ations|able)"
    r"|behaviours?|colours?|coloured|favours?|favourites?|honours?|honoured|neighbours?|neighbouring|licence|"
    r"centres?|centred|catalogues?|artefacts?|analyse[sd]?|analysing|labelled|labelling|modelled|modelling|"
    r"travelled|fulfils?|judgements?|defence|grey|programmes?|cheques?|dialogues?|whilst|towards)\b",
    re.IGNORECASE,
)
DEFINITION = re.compile(
    r"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:async\s+|const\s+|unsafe\s+)*(struct|enum|trait|type|union|fn|const|static)\s+(\w+)"
)
# Code spans and link targets in Markdown.
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|\bhttps?://\S+")
# Generated, or the words of others.
EXEMPT = re.compile(
    r"(^|/)(Cargo\.lock|models\.json|package-lock\.json)$|^deploy/helm/tests/golden|^crates/store/\.sqlx|^docs/tools\.md$"
    # Migrations never change once they are released.
    r"|^crates/store/migrations/00[0-3][0-9]_|^crates/store/migrations/0040_"
    r"|/cassettes/|/recorded/|\.lock$|^tests/clients/package|^scripts/dev/language\.py$|^docs/GLOSSARY\.md$"
)


def files():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if not EXEMPT.search(path) and pathlib.Path(path).is_file()]


def wide_comment(path, line):
    """Whether a line of code is a comment wider than allowed; code itself is the formatter's."""
    if len(line) <= WIDTH or "http://" in line or "https://" in line:
        return False
    mark = {".rs": "//", ".proto": "//", ".sh": "#", ".py": "#", ".toml": "#", ".yaml": "#", ".yml": "#", ".sql": "--"}
    return line.lstrip().startswith(mark.get(path.suffix, "\0"))


def check(name):
    path = pathlib.Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{name}:{number}"
        if path.suffix == ".rs" and (defined := DEFINITION.match(line)):
            kind, defined_name = defined.groups()
            banned = {"fn": FUNCTIONS, "const": CONSTANTS, "static": CONSTANTS}.get(kind, TYPES)
            if defined_name in banned:
                yield f"{place}: `{kind} {defined_name}` says nothing by itself; see docs/GLOSSARY.md"
        prose = "" if fenced or line.endswith("// stored") else CODE.sub("", line) if path.suffix == ".md" else line
        if path.suffix in {".rs", ".proto", ".md", ".sh", ".sql"} and (word := BRITISH.search(prose)):
            yield f"{place}: `{word.group()}` is British spelling"
        if path.suffix == ".md":
            fenced ^= line.lstrip().startswith("```")
            if len(line) > WIDTH and not fenced and not line.lstrip().startswith("|") and "](" not in line and "://" not in line:
                yield f"{place}: {len(line)} columns, at most {WIDTH}"
        elif wide_comment(path, line):
            yield f"{place}: a comment of {len(line)} columns, at most {WIDTH}"


def main():
    only = tuple(sys.argv[1:])
    found = [finding for name in files() if not only or name.startswith(only) for finding in check(name)]
    print("\n".join(found))
    if found:
        sys.exit(f"{len(found)} findings")


if __name__ == "__main__":
    main()

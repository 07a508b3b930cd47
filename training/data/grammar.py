"""English for captions: articles, and the labels that take none because they are plural, uncountable or a name."""

ZODIAC = frozenset(
    {
        "Aries",
        "Taurus",
        "Gemini",
        "Cancer",
        "Leo",
        "Virgo",
        "Libra",
        "Scorpio",
        "Sagittarius",
        "Capricorn",
        "Aquarius",
        "Pisces",
        "Ophiuchus",
    }
)
# Plural by their last word: "scissors" and "musical notes", never "a scissors".
_PLURAL = frozenset(
    {
        "bags",
        "beads",
        "beans",
        "blueberries",
        "books",
        "briefs",
        "bubbles",
        "cards",
        "chains",
        "cherries",
        "chopsticks",
        "clothes",
        "dividers",
        "dolls",
        "droplets",
        "fireworks",
        "frames",
        "fries",
        "glasses",
        "gloves",
        "goggles",
        "grapes",
        "hearts",
        "houses",
        "jeans",
        "knobs",
        "maracas",
        "mugs",
        "notes",
        "pancakes",
        "paperclips",
        "peanuts",
        "prints",
        "scissors",
        "shoes",
        "shorts",
        "skis",
        "socks",
        "sparkles",
        "springs",
        "sunglasses",
        "swords",
        "tabs",
        "tickets",
    }
)
# Uncountable nouns and games, whole label: "popcorn", "tennis".
_UNCOUNTABLE = frozenset(
    {
        "bacon",
        "badminton",
        "baguette bread",
        "bowling",
        "bread",
        "broccoli",
        "bubble tea",
        "butter",
        "camping",
        "canned food",
        "cooked rice",
        "cooking",
        "coral",
        "curry rice",
        "dango",
        "field hockey",
        "fire",
        "fog",
        "garlic",
        "ginger root",
        "ice",
        "ice hockey",
        "lacrosse",
        "mate",
        "meat on bone",
        "money with wings",
        "oden",
        "performing arts",
        "ping pong",
        "popcorn",
        "sake",
        "salt",
        "shaved ice",
        "soap",
        "spaghetti",
        "sushi",
        "tennis",
        "thread",
        "wood",
        "yarn",
    }
)
_A_DESPITE_VOWEL = ("uni", "one", "eu", "ewe", "use", "utensil")
_AN_DESPITE_CONSONANT = ("hour", "honest", "heir", "x-ray", "8", "11", "18")
# Acronyms are spelled out, so the name of the first letter counts: "an SUV", "a UFO".
_LETTERS_WITH_AN = "AEFHILMNORSX"


def takes_article(name: str) -> bool:
    """Whether "a" or "an" may stand before `name`."""
    if name in ZODIAC or name.lower() == "mount fuji" or name.lower() in _UNCOUNTABLE:
        return False
    return name.lower().split()[-1] not in _PLURAL


def article(name: str) -> str:
    """ "a" or "an", by sound as far as spelling tells it."""
    first = name.split()[0]
    if len(first) > 1 and first[:2].isupper():
        return "an" if first[0] in _LETTERS_WITH_AN else "a"
    word = first.lower()
    vowel = word[0] in "aeiou" and not word.startswith(_A_DESPITE_VOWEL)
    return "an" if vowel or word.startswith(_AN_DESPITE_CONSONANT) else "a"


def noun_phrase(name: str) -> str:
    """`name` with its article, or bare where it takes none: "an owl", "cherries"."""
    return f"{article(name)} {name}" if takes_article(name) else name

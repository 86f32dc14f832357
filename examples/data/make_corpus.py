"""Writes fra_eng_small.txt: simple English sentences and their French, in the format of the fra-eng data set.

    python examples/data/make_corpus.py

One pair a line, two columns separated by a tab, UTF-8, shortest English first.  As in the original file a narrow
no-break space (U+202F) stands before ! and ?.  All sentences are made here, by combining the words below.
"""

from pathlib import Path

NARROW = "\u202f"
PEOPLE = ["I", "You", "He", "She", "We", "They"]
PRONOUNS = ["je", "tu", "il", "elle", "nous", "ils"]
ETRE = ["suis", "es", "est", "est", "sommes", "sont"]
AVOIR = ["ai", "as", "a", "a", "avons", "ont"]
BE = ["am", "are", "is", "is", "are", "are"]
SHORT_BE = ["I'm", "You're", "He's", "She's", "We're", "They're"]
HAVE = ["have", "have", "has", "has", "have", "have"]

# English plain form and third person, then the six French forms
VERBS = [
    ("eat", "eats", "mange manges mange mange mangeons mangent"),
    ("see", "sees", "vois vois voit voit voyons voient"),
    ("take", "takes", "prends prends prend prend prenons prennent"),
    ("want", "wants", "veux veux veut veut voulons veulent"),
    ("sell", "sells", "vends vends vend vend vendons vendent"),
    ("look for", "looks for", "cherche cherches cherche cherche cherchons cherchent"),
    ("find", "finds", "trouve trouves trouve trouve trouvons trouvent"),
]
ALONE = [  # verbs that need no object
    ("sleep", "sleeps", "dors dors dort dort dormons dorment"),
    ("sing", "sings", "chante chantes chante chante chantons chantent"),
    ("work", "works", "travaille travailles travaille travaille travaillons travaillent"),
    ("dance", "dances", "danse danses danse danse dansons dansent"),
    ("run", "runs", "cours cours court court courons courent"),
    ("wait", "waits", "attends attends attend attend attendons attendent"),
    ("swim", "swims", "nage nages nage nage nageons nagent"),
    ("read", "reads", "lis lis lit lit lisons lisent"),
]
FOOD = [("the bread", "le pain"), ("the apple", "la pomme"), ("the cake", "le gâteau"), ("the soup", "la soupe")]
THINGS = [
    ("the book", "le livre"),
    ("the letter", "la lettre"),
    ("the car", "la voiture"),
    ("the table", "la table"),
    ("the key", "la clé"),
    ("the hat", "le chapeau"),
]
ANIMALS = [("the cat", "le chat"), ("the dog", "le chien"), ("the bird", "l'oiseau"), ("the horse", "le cheval")]
# English; French masculine and feminine
ADJECTIVES = [
    ("tired", "fatigué", "fatiguée"),
    ("calm", "calme", "calme"),
    ("sad", "triste", "triste"),
    ("rich", "riche", "riche"),
    ("tall", "grand", "grande"),
    ("small", "petit", "petite"),
    ("late", "en retard", "en retard"),
    ("strong", "fort", "forte"),
    ("sick", "malade", "malade"),
    ("free", "libre", "libre"),
]
STATES = [("hungry", "faim"), ("thirsty", "soif"), ("cold", "froid"), ("hot", "chaud"), ("afraid", "peur")]
COLOURS = [
    ("red", "rouge", "rouge"),
    ("black", "noir", "noire"),
    ("white", "blanc", "blanche"),
    ("old", "vieux", "vieille"),
]
PLACES = [
    ("home", "à la maison"),
    ("at school", "à l'école"),
    ("in the garden", "dans le jardin"),
    ("in Paris", "à Paris"),
    ("in the kitchen", "dans la cuisine"),
]
COMMANDS = [
    ("Go", "Va"),
    ("Run", "Cours"),
    ("Wait", "Attends"),
    ("Sing", "Chante"),
    ("Dance", "Danse"),
    ("Swim", "Nage"),
    ("Work", "Travaille"),
    ("Read", "Lis"),
    ("Sleep", "Dors"),
    ("Come here", "Viens ici"),
    ("Help me", "Aide-moi"),
    ("Look at me", "Regarde-moi"),
    ("Listen", "Écoute"),
    ("Sit down", "Assieds-toi"),
    ("Stand up", "Lève-toi"),
]


def joined(pronoun, rest):
    """je + a vowel is j'."""
    return f"j'{rest}" if pronoun == "je" and rest[0] in "aeéiou" else f"{pronoun} {rest}"


def said(english, french, mark="."):
    english, french = english[0].upper() + english[1:], french[0].upper() + french[1:]
    return english + mark, french + (mark if mark == "." else NARROW + mark)


def adjective(row, person):
    """The French form for I, you, he, she, we, they; groups are masculine plural."""
    _, masculine, feminine = row
    form = feminine if person == 3 else masculine
    plural = person >= 4 and masculine != "en retard" and not form.endswith(("s", "x"))
    return form + "s" if plural else form


def is_feminine(noun):
    return noun.startswith("la ")


def about_people():
    for i, pronoun in enumerate(PRONOUNS):
        for row in ADJECTIVES:
            yield said(f"{SHORT_BE[i]} {row[0]}", joined(pronoun, f"{ETRE[i]} {adjective(row, i)}"))
        for english, french in STATES:
            yield said(f"{SHORT_BE[i]} {english}", joined(pronoun, f"{AVOIR[i]} {french}"))
        for english, french in PLACES:
            yield said(f"{SHORT_BE[i]} {english}", joined(pronoun, f"{ETRE[i]} {french}"))
        for plain, third, forms in ALONE:
            verb, french = third if i in (2, 3) else plain, forms.split()[i]
            yield said(f"{PEOPLE[i]} {verb}", joined(pronoun, french))
            yield said(f"{PEOPLE[i]} {verb} now", joined(pronoun, f"{french} maintenant"))
            do = "does" if i in (2, 3) else "do"
            if plain != "wait":
                yield said(f"{PEOPLE[i]} {do} not {plain}", f"{pronoun} ne {french} pas")
            if i > 0:
                que = "qu'" if pronoun[0] in "ei" else "que "
                yield said(f"{do} {PEOPLE[i].lower()} {plain}", f"est-ce {que}{pronoun} {french}", "?")


def with_objects():
    for i, pronoun in enumerate(PRONOUNS):
        for plain, third, forms in VERBS:
            objects = FOOD if plain == "eat" else THINGS + ANIMALS[:2]
            for english, french in objects:
                verb = third if i in (2, 3) else plain
                yield said(f"{PEOPLE[i]} {verb} {english}", joined(pronoun, f"{forms.split()[i]} {french}"))
        for english, french in ANIMALS + THINGS[:3]:
            article = "une" if is_feminine(french) else "un"
            noun = french.replace("l'", "").split()[-1]
            indefinite = english.replace("the ", "a ")
            yield said(f"{PEOPLE[i]} {HAVE[i]} {indefinite}", joined(pronoun, f"{AVOIR[i]} {article} {noun}"))


def about_things():
    for row in ADJECTIVES:
        yield said(f"the boy is {row[0]}", f"le garçon est {adjective(row, 2)}")
        yield said(f"the girl is {row[0]}", f"la fille est {adjective(row, 3)}")
    for english, french in THINGS + ANIMALS:
        for colour, masculine, feminine in COLOURS:
            if french.startswith("l'") and colour == "old":
                continue
            yield said(f"{english} is {colour}", f"{french} est {feminine if is_feminine(french) else masculine}")
        yield said(f"where is {english}", f"où est {french}", "?")
        for place, lieu in PLACES[2:]:
            if place != "in Paris":
                yield said(f"{english} is {place}", f"{french} est {lieu}")


def pairs():
    found = [said(english, french, "!") for english, french in COMMANDS]
    found += [said(f"{english} now", f"{french} maintenant", "!") for english, french in COMMANDS]
    for part in (about_people, with_objects, about_things):
        found += part()
    unique = dict(reversed(found))  # one French sentence for each English one
    return sorted(unique.items(), key=lambda pair: (len(pair[0]), pair[0]))


def main():
    path = Path(__file__).with_name("fra_eng_small.txt")
    lines = ["\t".join(pair) for pair in pairs()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} pairs in {path.name}")


if __name__ == "__main__":
    main()

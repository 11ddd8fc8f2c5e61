"""What a statement takes for granted, read off the event, so that no statement can leave it out."""

from fedrp.privacy import events

KEY_SECRECY = "the adversary does not learn the round keys; each is fresh, and its matrix is as good as ideal Gaussian"
RATIO = "the sensitivity and the norm (or distance) floor hold for both adjacent data sets"
HISTORIES = "they hold for any two secret histories that fit the transcript, as a ball around the start ensures"
OTHERS_FIXED = "given the transcript, the other clients' vectors do not depend on the changed data"
SENSITIVITY = "the sensitivity that the noise multiplier refers to is enforced, and the noise is ideal Gaussian"
ONE_RUN = "no other run on the same data is counted, nor one that was begun and given up: their epsilons add up"
COINS = "who takes part is decided by coins that depend on nothing else"
SIMULATED = "this is a deployment with the same settings, whose secrets nobody else knows: a simulation's own secrets "
SIMULATED += "follow from its public seed, so the models that it makes are not private"
HIDDEN = "nobody learns who took part or how many: noise level and denominator do not depend on it"

RECORDS = "the number of records that sampling rate, steps and denominator are made of is no secret, and stays the same"
RECORD_COINS = "each record is in a batch by a secret coin of its own (AES-256 under the site's key is unbroken)"
RECORD_CLIP = "what each record adds to a batch is clipped by itself, depends neither on other records nor on its "
RECORD_CLIP += "place among them (not even by rounding), and the noise is ideal Gaussian"


def implied_assumptions(event: events.Event) -> tuple[str, ...]:
    """The assumptions under which a bound on this event holds, in a fixed order, each once."""
    found: list[str] = []
    for leaf, count in events.leaves(event):
        if isinstance(leaf, events.ProjectedRelease):
            found += [KEY_SECRECY, RATIO]
            if count > 1:
                found.append(HISTORIES)
                found += [OTHERS_FIXED] * isinstance(leaf, events.JointProjectedRelease)
        elif isinstance(leaf, events.GaussianRelease):
            found.append(SENSITIVITY)
        elif isinstance(leaf, events.SampledRecords):
            found += [RECORD_CLIP, RECORD_COINS, RECORDS]
        elif isinstance(leaf, events.PoissonSampled):
            found += [SENSITIVITY, COINS, *[HIDDEN] * leaf.participation_hidden]
    return tuple(dict.fromkeys([*found, ONE_RUN] if found else found))

"""The demonstration of rounds: several trainers train one model together, and one of them is killed."""

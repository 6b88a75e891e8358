"""The maths of Factored Gossip DiLoCo: who mixes with whom, what a mean is, what travels. Equal in bits everywhere."""

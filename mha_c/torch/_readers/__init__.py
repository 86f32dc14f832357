"""Readers' own modules, whose calls were read: layer.py, the layer of ours that a reading is; plans.py, a call of it;
call_masks.py, its masks; keys.py, what calls must have in common; modules.py, the class of a module that is read;
candidates.py, which are."""

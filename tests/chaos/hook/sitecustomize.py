"""Python imports this module at its start if PYTHONPATH begins with this folder."""

import chaos_hook

chaos_hook.install()

#!/usr/bin/env bash
# Make the virtual environment of the peer, TRL 1.9.2 (later releases dropped the PPOTrainer).
# In:  $1  folder of the environment (default: .venv-trl), $PYTHON (default: python3).
# Out: that folder, ready; versions on stdout. A folder that already fits is left as it is.
set -euo pipefail

venv="${1:-.venv-trl}"
python="${PYTHON:-python3}"
torch_version="2.13.0"
trl_version="1.9.2"
# The same transformers as our side, so that both run the same modelling and generation code.
transformers_version="5.19.0"

versions() {
    "$venv/bin/python" - <<'PY'
import importlib.metadata as metadata

for name in ("torch", "trl", "transformers", "accelerate", "datasets", "tokenizers", "psutil"):
    print(f"{name}=={metadata.version(name)}")
PY
}

wanted=("torch==$torch_version(\+cpu)?" "trl==$trl_version" "transformers==$transformers_version")
have=""
if [ -x "$venv/bin/python" ]; then
    have="$(versions 2>/dev/null || true)"
fi
for requirement in "${wanted[@]}"; do
    if ! grep -Eqx "$requirement" <<<"$have"; then
        echo "[trl_setup] $venv lacks ${requirement%%(*}: installing"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        # torch first and pinned: otherwise pip may choose a build with several GB of CUDA libraries.
        "$venv/bin/python" -m pip install -q "torch==$torch_version"
        "$venv/bin/python" -m pip install -q "trl==$trl_version" "transformers==$transformers_version" \
            accelerate datasets psutil
        break
    fi
done
echo "[trl_setup] $venv is ready:"
versions

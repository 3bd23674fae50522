"""How often the forecast from config.json alone is what vLLM builds.

    python -m benchmarks.forecast [FAMILY ...]

One line for each case that is wrong or refused, then the figure: shares of all cases. The engine's
answers are kept (tests/conformance/golden/forecast-*.json), so that no engine is needed.
"""

from __future__ import annotations

import sys

from tests.conformance.test_forecast import figure, near, verdicts


def main() -> None:
    families = {*sys.argv[1:]}
    cases = [
        verdict for verdict in verdicts() if not families or verdict.case.split()[0] in families
    ]
    for case in cases:
        if not near(case) or case.kernels[0] or case.backends[0]:
            print(f"{case.case}: guessed {', '.join(case.guessed) or 'nothing'}; {case.words}")
    print(
        f"{len(cases)} cases of {len({each_case.case.split()[0] for each_case in cases})} families"
    )
    for name, share in figure(cases).items():
        print(f"{name}: {share:.1%}")


if __name__ == "__main__":
    main()

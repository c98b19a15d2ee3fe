"""Questions about quantities: each function draws its numbers and returns the question and the answer with a unit."""

from collections.abc import Callable
from random import Random

Formula = Callable[[Random], tuple[str, str]]

GAS_CONSTANT = 8.314462618  # J/(mol*K), CODATA 2018
GRAVITY = 9.81  # m/s^2
WATER_HEAT = 4.18  # J/(g*K), specific heat of liquid water
MOLAR_MASSES = {"H2O": 18.015, "NaCl": 58.44, "CO2": 44.009, "NH3": 17.031, "C6H12O6": 180.156}  # g/mol, IUPAC 2021


def speed(source: Random) -> tuple[str, str]:
    """v = s / t."""
    distance, minutes = source.randint(5, 200), source.randint(3, 150)
    question = f"A train travels {distance} km in {minutes} min. What is its mean speed in km/h?"
    return question, f"{distance / minutes * 60:.6g} km/h"


def kinetic_energy(source: Random) -> tuple[str, str]:
    """E = m v^2 / 2."""
    mass, velocity = source.randint(1, 90), source.randint(2, 40)
    question = f"What is the kinetic energy of a body of {mass} kg that moves at {velocity} m/s, in J?"
    return question, f"{mass * velocity**2 / 2:.6g} J"


def ohm(source: Random) -> tuple[str, str]:
    """I = U / R."""
    voltage, resistance = source.randint(2, 240), source.randint(5, 900)
    question = f"A voltage of {voltage} V is across a resistor of {resistance} ohm. What is the current in A?"
    return question, f"{voltage / resistance:.6g} A"


def pressure_at_depth(source: Random) -> tuple[str, str]:
    """p = rho g h."""
    density, depth = source.randint(700, 1300), source.randint(2, 80)
    question = (
        f"A liquid has a density of {density} kg/m^3. By how many kPa is the pressure at a depth of {depth} m higher "
        f"than at the surface? Use g = {GRAVITY} m/s^2."
    )
    return question, f"{density * GRAVITY * depth / 1000:.6g} kPa"


def ideal_gas(source: Random) -> tuple[str, str]:
    """V = n R T / p."""
    moles, kelvin, pressure = source.randint(1, 20), source.randint(250, 450), source.randint(80, 400)
    question = f"What volume do {moles} mol of an ideal gas have at {kelvin} K and {pressure} kPa, in L?"
    return question, f"{moles * GAS_CONSTANT * kelvin / pressure:.6g} L"


def moles_of_mass(source: Random) -> tuple[str, str]:
    """n = m / M."""
    formula = source.choice(sorted(MOLAR_MASSES))
    grams = source.randint(2, 500)
    question = f"How many moles are {grams} g of {formula} (molar mass {MOLAR_MASSES[formula]} g/mol)?"
    return question, f"{grams / MOLAR_MASSES[formula]:.6g} mol"


def dilution(source: Random) -> tuple[str, str]:
    """c2 = c1 V1 / V2."""
    concentration, volume = source.randint(1, 60) / 10, source.randint(5, 100)
    total = volume * source.randint(2, 9)
    question = (
        f"{volume} mL of a solution of {concentration} mol/L are filled up with water to {total} mL. "
        "What is the concentration in mol/L?"
    )
    return question, f"{concentration * volume / total:.6g} mol/L"


def heat(source: Random) -> tuple[str, str]:
    """Q = m c dT."""
    grams, kelvin = source.randint(50, 900), source.randint(5, 60)
    question = (
        f"How much heat warms {grams} g of water by {kelvin} K, in kJ? Its specific heat is {WATER_HEAT} J/(g*K)."
    )
    return question, f"{grams * WATER_HEAT * kelvin / 1000:.6g} kJ"


def doubling(source: Random) -> tuple[str, str]:
    """N = N0 2^(t / T)."""
    start, period, periods = source.randint(2, 50) * 100, source.randint(15, 60), source.randint(2, 9)
    question = (
        f"A culture of {start} bacteria doubles every {period} min. How many are there after {period * periods} min?"
    )
    return question, str(start * 2**periods)


def allele_frequency(source: Random) -> tuple[str, str]:
    """2 p q of Hardy and Weinberg."""
    frequency = source.randint(5, 95) / 100
    question = (
        f"In a population in Hardy-Weinberg equilibrium one of two alleles has a frequency of {frequency}. "
        "What share of the individuals is heterozygous?"
    )
    return question, f"{2 * frequency * (1 - frequency):.6g}"


FORMULAS: tuple[Formula, ...] = (
    speed,
    kinetic_energy,
    ohm,
    pressure_at_depth,
    ideal_gas,
    moles_of_mass,
    dilution,
    heat,
    doubling,
    allele_frequency,
)

// Numbers with their units, in words that fit a chart.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 1234567 -> "1,234,567" */
export const count = (value) => whole.format(value);

/** 1234567 -> "1.2M" */
export function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    // Rounding up may reach the next unit's size, which the larger unit then shows.
    if (value >= size * 0.9995) {
      const scaled = value / size;
      return (scaled < 9.95 ? scaled.toFixed(1).replace(/\.0$/, "") : whole.format(scaled)) + unit;
    }
  }
  return whole.format(value);
}

/** 0.8734 -> "87 %"; what is neither nothing nor all never looks like it. */
export function percent(fraction) {
  const value = fraction * 100;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value > 99.9) return "99.9 %";
  return (value < 10 || value > 99 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(0)) + " %";
}

/** Seconds -> "850 ms", "1.24 s", "3.1 min", "2.5 h" */
export function seconds(value) {
  if (value < 0.0095) return (value * 1000).toFixed(1).replace(/\.0$/, "") + " ms";
  if (value < 0.9995) return (value * 1000).toFixed(0) + " ms";
  if (value < 9.995) return value.toFixed(2) + " s";
  if (value < 90) return value.toFixed(0) + " s";
  if (value < 5400) return (value / 60).toFixed(value < 594 ? 1 : 0).replace(/\.0$/, "") + " min";
  return (value / 3600).toFixed(value < 35640 ? 1 : 0).replace(/\.0$/, "") + " h";
}

/** Seconds since something -> "just now", "12 s ago" */
export const ago = (value) => (value < 1.5 ? "just now" : seconds(Math.round(value)).replace(".00", "") + " ago");

/** Bytes -> "1.5 GiB" */
export function bytes(value) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) {
      const scaled = value / size;
      return scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0) + " " + unit;
    }
  }
  return whole.format(value) + " B";
}

/** 1 -> "1 token", 2 -> "2 tokens" */
export const plural = (value, name) => `${count(value)} ${name}${value === 1 ? "" : "s"}`;

/** The time of day of something `age` seconds ago, by this machine's clock. */
export const timeOfDay = (age) =>
  new Date(Date.now() - age * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

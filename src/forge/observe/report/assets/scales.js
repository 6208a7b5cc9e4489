// From numbers to places on a chart.

function linear(low, high, from, to) {
  const width = high - low || 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

function logarithmic(low, high, from, to) {
  const place = linear(Math.log(low), Math.log(high), from, to);
  return (value) => place(Math.log(Math.max(value, low)));
}

function roundTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  const ticks = [];
  for (let number = Math.ceil(low / unit - 1e-9); number * unit <= high + unit * 1e-9; number += 1) {
    ticks.push(Number((number * unit).toPrecision(12)));
  }
  return ticks;
}

function stepTicks(low, high, count) {
  return roundTicks(low, high, count).filter((tick) => Number.isInteger(tick));
}

const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 345600, 604800];

function timeTicks(low, high, count) {
  const unit = SPANS.find((seconds) => (high - low) / seconds <= count) || roundTicks(0, high - low, count)[1] || 1;
  const ticks = [];
  for (let tick = Math.ceil(low / unit) * unit; tick <= high; tick += unit) ticks.push(tick);
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high) - Math.log10(low);
  const factors = decades > count ? [1] : decades > 1.5 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  const stride = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (power % stride) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// A moving mean that forgets: its weight on the past is `past`, and the beginning is not drawn towards 0.
function smooth(points, past) {
  if (!past) return points;
  let [sum, weight] = [0, 0];
  return points.map(([row, value]) => {
    sum = past * sum + (1 - past) * value;
    weight = past * weight + (1 - past);
    return [row, sum / weight];
  });
}

function pathOf(points, x, y) {
  let text = '';
  points.forEach(([row, value, begins], place) => {
    text += `${place === 0 || begins ? 'M' : 'L'}${x(row).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return text;
}

function areaOf(upper, lower, x, y) {
  if (!upper.length) return '';
  const back = lower.slice().reverse().map(([row, value]) => `L${x(row).toFixed(1)} ${y(value).toFixed(1)}`);
  return `${pathOf(upper.map(([row, value]) => [row, value]), x, y)}${back.join('')}Z`;
}

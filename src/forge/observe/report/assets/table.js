// Metrics by row: a row is a step, or several of which it has the mean. Rows are in the order of steps.

const AXES = {
  step: { label: 'step', name: 'Step' },
  time: { label: 'time', name: 'Time' },
  tokens: { label: 'tokens', name: 'Tokens' },
};

// What is looked up by the name of a metric: a metric may be called `constructor`.
function byMetric(found) {
  return Object.assign(Object.create(null), found);
}

class Table {
  constructor(source) {
    this.origin = null;
    this.take(source);
  }

  take({ steps, times, tokens, columns, low, high, nonfinite, stride }) {
    Object.assign(this, { steps, times: times || [], tokens: tokens || [], columns: byMetric(columns), low: byMetric(low), high: byMetric(high), nonfinite: byMetric(nonfinite), stride: stride || 1 });
    if (this.origin === null && this.times.length) [this.origin] = this.times;
    this.places = {};
  }

  get length() {
    return this.steps.length;
  }

  // Where rows stand on an axis: steps, seconds since the first one, or tokens.
  xs(axis) {
    if (axis === 'step') return this.steps;
    if (!this.places[axis]) this.places[axis] = axis === 'time' ? this.times.map((time) => time - this.origin) : this.tokens;
    return this.places[axis];
  }

  has(axis) {
    const xs = this.xs(axis);
    return xs.length > 0 && xs.length === this.length && (axis === 'step' || xs[xs.length - 1] > xs[0]);
  }

  // The first row at or after a place.
  after(axis, x) {
    const xs = this.xs(axis);
    let [low, high] = [0, xs.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  nearest(axis, x) {
    const xs = this.xs(axis);
    const at = Math.min(this.after(axis, x), xs.length - 1);
    return at > 0 && x - xs[at - 1] <= xs[at] - x ? at - 1 : at;
  }

  // What a metric was at a row: for one that is not written at every step, what it was last. Null before its first.
  known(key, row) {
    const column = this.columns[key] || [];
    let at = row;
    while (at >= 0 && (column[at] === null || column[at] === undefined)) at -= 1;
    return at < 0 ? null : column[at];
  }

  values(key) {
    return (this.columns[key] || []).filter((value) => value !== null && value !== undefined);
  }

  // Adds rows that follow, of which the first may be the last one here, with more metrics than before.
  append(rows) {
    const keep = this.after('step', rows.steps[0]);
    const join = (mine, others) => mine.slice(0, keep).concat(others);
    const blank = (count) => new Array(count).fill(null);
    const [columns, theirs] = [byMetric(), byMetric(rows.columns)];
    for (const key of new Set([...Object.keys(this.columns), ...Object.keys(rows.columns)])) {
      columns[key] = join(this.columns[key] || blank(keep), theirs[key] || blank(rows.steps.length));
    }
    const nonfinite = byMetric(this.nonfinite);
    for (const [key, steps] of Object.entries(rows.nonfinite || {})) nonfinite[key] = [...new Set([...(nonfinite[key] || []), ...steps])];
    this.take({
      steps: join(this.steps, rows.steps), times: join(this.times, rows.times), tokens: join(this.tokens, rows.tokens),
      columns, low: this.low, high: this.high, nonfinite, stride: this.stride,
    });
  }
}

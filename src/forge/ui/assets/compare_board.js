// Charts of several runs: one curve for each run, or one for runs that differ only in their seeds.

const BANDS = { range: 'smallest to largest', deviation: 'one standard deviation' };
const GRID = 700;

// The rows of several tables as one: what a board asks of a table.
class Tables {
  constructor() {
    this.all = [];
    this.stride = 1;
    this.cache = {};
  }

  set(tables) {
    this.all = tables;
    this.stride = Math.max(1, ...tables.map((table) => table.stride));
    this.cache = {};
  }

  get length() {
    return this.xs('step').length;
  }

  get steps() {
    return this.xs('step');
  }

  xs(axis) {
    this.cache[axis] ||= [...new Set(this.all.filter((table) => table.has(axis)).flatMap((table) => table.xs(axis)))].sort((one, other) => one - other);
    return this.cache[axis];
  }

  has(axis) {
    return this.all.some((table) => table.has(axis));
  }

  after(axis, x) {
    return Table.prototype.after.call(this, axis, x);
  }

  nearest(axis, x) {
    return Table.prototype.nearest.call(this, axis, x);
  }
}

// The board of the page: `runs` have an id, a label, a tone, a table, and the part that is looked at in more detail.
class CompareBoard extends Board {
  constructor(runs) {
    super(new Tables(), { lazy: true });
    Object.assign(this, { runs, groups: null, band: 'range' });
  }

  tableOf(run) {
    return this.range && run.detail ? run.detail : run.table;
  }

  get visible() {
    return this.runs.filter((run) => !run.isHidden);
  }

  look() {
    this.table.set((this.runs ? this.visible : []).map((run) => this.tableOf(run)));
    super.look();
  }

  show(change) {
    if ('range' in change || 'axis' in change) this.runs.forEach((run) => { run.detail = null; });
    super.show(change);
  }

  cursorText() {
    const { axis, cursor } = this;
    if (axis === 'time') return `After ${span(cursor)}`;
    return axis === 'tokens' ? `${figure(cursor)} tokens` : `Step ${cursor.toLocaleString('en-US')}`;
  }
}

// The value of a line between its points; null outside of it.
function valueAt(line, x) {
  if (!line.length || x < line[0][0] || x > line[line.length - 1][0]) return null;
  let [low, high] = [0, line.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [[from, before], [to, after]] = [line[low], line[high]];
  return to === from ? before : before + ((x - from) / (to - from)) * (after - before);
}

// The places of several lines, at most so many.
function gridOf(lines, count) {
  const places = [...new Set(lines.flatMap((line) => line.map(([x]) => x)))].sort((one, other) => one - other);
  if (places.length <= count) return places;
  const stride = (places.length - 1) / (count - 1);
  return Array.from({ length: count }, (_, number) => places[Math.round(number * stride)]);
}

// The mean of several lines, and how far they spread: between the smallest and the largest, or by a standard deviation.
function meanOf(lines, band) {
  const [line, upper, lower] = [[], [], []];
  for (const x of gridOf(lines, GRID)) {
    const values = lines.map((each) => valueAt(each, x)).filter((value) => value !== null);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length);
    const [low, high] = band === 'range' ? [Math.min(...values), Math.max(...values)] : [mean - spread, mean + spread];
    line.push([x, mean, false, values.length]);
    upper.push([x, high]);
    lower.push([x, low]);
  }
  return { line, upper, lower };
}

class CompareChart extends Chart {
  table(series) {
    return this.board.tableOf(series.runs[0]);
  }

  hasPositive() {
    const known = this.plan.series.flatMap(({ key, runs }) => runs.flatMap((run) => run.table.values(key)));
    return known.filter((value) => value > 0).length > 0.8 * known.length;
  }

  visible() {
    return super.visible().filter(({ series }) => series.runs.some((run) => !run.isHidden));
  }

  lineLayers() {
    return this.visible().map(({ series, place }) => {
      const runs = series.runs.filter((run) => !run.isHidden);
      if (series.runs.length === 1) return this.lineOf(series, runs[0], place);
      const lines = runs.map((run) => this.smoothed(series, run).line).filter((line) => line.length);
      return { series, place, ...meanOf(lines, this.board.band), reach: true };
    });
  }

  smoothed(series, run) {
    const table = this.board.tableOf(run);
    const raw = table.has(this.board.axis) ? this.points(table, table.columns[series.key] || [], series.key) : [];
    const past = this.board.smoothing;
    const isDense = raw.length > 12;
    const line = isDense && past ? smooth(raw, past).map((point, at) => [point[0], point[1], raw[at][2]]) : raw;
    return { line, raw, isFaint: isDense && past > 0 };
  }

  lineOf(series, run, place) {
    const { line, raw, isFaint } = this.smoothed(series, run);
    return { series, place, line, faint: isFaint ? raw : null, dots: raw.length <= 16 };
  }

  // Runs have rows of their own, so a line has no point exactly at the cursor.
  pointAt(line, cursor) {
    const value = valueAt(line, cursor);
    return value === null ? null : [cursor, value];
  }

  reading(series, cursor) {
    const { unit } = this.plan;
    const shown = (value) => (value === null ? '–' : figure(value, unit) + (unit && unit !== '%' ? ` ${unit}` : ''));
    const layer = (this.drawn || []).find((each) => each.series === series);
    const runs = series.runs.filter((run) => !run.isHidden);
    if (!runs.length || (!layer && cursor === null)) return '–';
    if (series.runs.length === 1) {
      const table = this.board.tableOf(runs[0]);
      if (cursor === null) return shown(table.length ? table.known(series.key, table.length - 1) : null);
      const xs = table.xs(this.board.axis);
      if (!xs.length || cursor > xs[xs.length - 1]) return '–'; // it has not come so far
      return super.reading(series, cursor);
    }
    if (!layer?.line.length) return '–';
    const at = cursor === null ? layer.line[layer.line.length - 1][0] : cursor;
    const [mean, high, low] = [layer.line, layer.upper, layer.lower].map((line) => valueAt(line, at));
    if (mean === null) return '–';
    return this.board.band === 'range' ? `${shown(mean)} (${figure(low, unit)} to ${figure(high, unit)})` : `${shown(mean)} ± ${figure(high - mean, unit)}`;
  }
}

// The plans of charts of one run as plans of charts of several: each metric has a chart of its own.
function comparePlans(plans, runs, groups) {
  return plans.flatMap((plan) => plan.series.map(({ key, label }) => {
    const isAlone = plan.series.length === 1;
    const has = (run) => (run.table.columns[key] || []).some((value) => value !== null);
    const series = groups
      ? groups.map((members, number) => ({ key, label: groupLabel(members), runs: members.filter(has), tone: number }))
      : runs.map((run) => ({ key, label: run.label, runs: has(run) ? [run] : [], tone: run.tone }));
    return { ...plan, title: isAlone ? plan.title : `${plan.title}: ${label}`, stack: false, series: series.filter((one) => one.runs.length) };
  })).filter(({ series }) => series.length);
}

// What the names of runs begin with, and how many there are.
function groupLabel(members) {
  const [first] = members;
  if (members.length === 1) return first.label;
  let shared = 0;
  while (shared < first.label.length && members.every(({ label }) => label[shared] === first.label[shared])) shared += 1;
  return `${first.label.slice(0, shared)}… (${members.length})`;
}

// What tells runs apart: their paths without the folders that all of them are in.
function shortLabels(ids) {
  const parts = ids.map((id) => id.split('/'));
  const most = Math.min(...parts.map((words) => words.length)) - 1;
  let shared = 0;
  while (shared < most && parts.every((words) => words[shared] === parts[0][shared])) shared += 1;
  return parts.map((words) => words.slice(shared).join('/'));
}

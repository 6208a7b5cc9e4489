// Commands for a run: only where `forge ui --control` allows them.

const ACTIONS = {
  evaluate: { label: 'Evaluate now', told: 'evaluates after the step in progress' },
  save: { label: 'Save now', told: 'saves after the step in progress' },
  profile: { label: 'Profile the next step', told: 'profiles the step after the one in progress' },
  stop: { label: 'Stop after this step', told: 'finishes its step, saves and ends' },
};

class Refused extends Error {
  constructor(status, fields) {
    super(fields.message || `the server answered with status ${status}`);
    this.fields = fields;
  }
}

// Sends a command. The answer comes when the run has carried it out, which may take as long as a step.
async function command(run, name, more = {}) {
  const answer = await fetch('/api/control', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ run, command: name, ...more }) });
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error || {});
}

// A value as it was typed: a number where it is one, else text, which the run judges.
function typedValue(text) {
  const word = text.trim();
  if (word === 'null') return null;
  return word !== '' && Number.isFinite(Number(word)) ? Number(word) : word;
}

class ControlView {
  constructor(run) {
    Object.assign(this, { run, status: null, isClosed: false, fields: new Map(), waiting: new Map() });
    this.where = make('p', { class: 'state', 'data-test': 'where' });
    this.actions = make('div', { class: 'actions' }, ...Object.entries(ACTIONS).map(([name, { label }]) => make('button', { type: 'button', class: name === 'stop' ? 'danger' : '', 'data-act': name, text: label, on: { click: () => (name === 'stop' ? this.confirm.showModal() : this.act(name)) } })));
    this.settings = make('div', { class: 'settingsform' });
    this.apply = make('button', { type: 'submit', class: 'act', text: 'Change' });
    this.form = make('form', { class: 'card control', 'data-test': 'settings-form' }, make('h3', { text: 'Settings' }), make('p', { class: 'help', text: 'They hold from the step after the one in progress. All that you change here is changed together, or nothing. Each change is recorded, and made again by a resume and by forge replay.' }), this.settings, this.apply);
    this.form.addEventListener('submit', (event) => { event.preventDefault(); this.change(); });
    this.results = make('ol', { class: 'card results', 'aria-live': 'polite', 'data-test': 'results', hidden: true });
    this.confirm = this.confirmation();
    this.off = make('p', { class: 'card help', 'data-test': 'inactive', hidden: true });
    this.on = make('div', { class: 'commanding' }, make('section', { class: 'card control' }, make('h3', { text: 'The run' }), this.where, this.actions), this.form);
    this.node = make('div', {}, this.off, this.on, this.results, this.confirm);
    this.load();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
  }

  confirmation() {
    const go = make('button', { type: 'button', class: 'danger', 'data-test': 'confirm-stop', text: 'Stop the run', on: { click: () => { this.confirm.close(); this.act('stop'); } } });
    return make(
      'dialog', { class: 'keys', 'aria-label': 'Stop the run' }, make('h2', { text: 'Stop this run?' }),
      make('p', { text: 'It finishes the step in progress, saves and ends, as with Ctrl-C. --resume continues it; forge run --supervise does not start it again.' }),
      make('form', { method: 'dialog', class: 'actions' }, make('button', { text: 'Let it run' }), go),
    );
  }

  // Asks where the run is: again with each step, and now and then, because a step may be long. One request at a time.
  async load() {
    clearTimeout(this.timer);
    this.isStale = true;
    if (this.isAsking) return;
    this.isAsking = true;
    let found = null;
    while (this.isStale && !this.isClosed) {
      this.isStale = false;
      found = await ask('control', { run: this.run.id }).catch((error) => ({ isActive: false, why: error.message }));
    }
    this.isAsking = false;
    if (this.isClosed) return;
    this.timer = setTimeout(() => this.load(), 3000);
    this.status = found;
    this.off.hidden = found.isActive;
    this.on.hidden = !found.isActive;
    if (found.isActive) this.render();
    else this.off.textContent = `This run takes no commands: ${found.why}. A run takes commands from its first step to its last, on the machine that it runs on.`;
  }

  hear() {
    this.load();
  }

  render() {
    const { step, max_steps: most, waits_for: waits, is_stopping: isStopping, settings, planned, commands, workers } = this.status;
    const waiting = Object.entries(commands).map(([name, count]) => `${count} ${name}`).join(', ');
    this.where.replaceChildren(
      make('b', { text: `after ${stepText(step, most)}` }), `${isStopping ? ' · stopping' : ''} · ${waits.join('; ') || 'between two steps'}`,
      ...(workers ? [make('small', { text: Object.entries(workers).map(([kind, count]) => `${kind}: ${count}`).join(', ') })] : []),
      ...(waiting ? [make('small', { text: `for the end of the step: ${waiting}` })] : []),
    );
    this.actions.querySelector('[data-act=stop]').disabled = isStopping;
    const names = Object.keys(settings).join();
    if (names !== this.names) this.renderFields(settings);
    this.names = names;
    for (const [key, { value, configured }] of Object.entries(settings)) {
      const { input, note } = this.fields.get(key);
      const text = value === null ? 'null' : String(value);
      if (input.value === input.dataset.known) input.value = text; // unless another value was typed
      input.dataset.known = text;
      const plans = planned.filter((each) => each.key === key).map((each) => `${each.after} from step ${each.from_step} on`);
      note.textContent = [value === configured ? '' : `configured: ${configured}`, ...plans].filter((word) => word).join(' · ');
    }
    this.mark();
  }

  renderFields(settings) {
    this.fields.clear();
    this.settings.replaceChildren(...Object.entries(settings).map(([key, { meaning }]) => {
      const input = make('input', { type: 'text', inputmode: 'decimal', autocomplete: 'off', spellcheck: 'false', name: key, 'data-known': '', value: '' });
      input.addEventListener('input', () => this.mark());
      const note = make('small', {});
      this.fields.set(key, { input, note });
      return make('label', {}, make('code', { text: key }), make('span', { class: 'help', text: meaning }), input, note);
    }));
  }

  // The fields that have another value than the run.
  changed() {
    return [...this.fields].filter(([, { input }]) => input.value.trim() !== input.dataset.known);
  }

  mark() {
    const changed = this.changed();
    this.fields.forEach(({ input }) => input.classList.toggle('other', input.value.trim() !== input.dataset.known));
    this.apply.disabled = !changed.length;
    this.apply.textContent = changed.length > 1 ? `Change ${changed.length} settings` : 'Change';
  }

  change() {
    const values = Object.fromEntries(this.changed().map(([key, { input }]) => [key, typedValue(input.value)]));
    if (!Object.keys(values).length) return;
    this.act('set', { values });
  }

  async act(name, more = {}) {
    const what = name === 'set' ? Object.entries(more.values).map(([key, value]) => `${key} = ${value}`).join(', ') : ACTIONS[name].label;
    const item = make('li', { class: 'pending' }, make('b', { text: what }), make('small', { text: name === 'set' ? 'is changed after the step in progress…' : `${ACTIONS[name].told}…` }));
    this.results.hidden = false;
    this.results.prepend(item);
    while (this.results.childElementCount > 30) this.results.lastChild.remove();
    this.load();
    try {
      const found = await command(this.run.id, name, more);
      item.className = 'done';
      item.replaceChildren(make('b', { text: what }), make('small', { text: answerText(name, found) }));
      if (name === 'set') this.fields.forEach(({ input }, key) => { if (key in more.values) input.dataset.known = input.value; });
    } catch (error) {
      item.className = 'refused';
      item.replaceChildren(make('b', { text: what }), make('span', { text: error.message }), refusalFields(error.fields || {}));
    }
    if (!this.isClosed) this.load();
  }
}

function answerText(name, found) {
  if (name === 'set') return found.changes.length ? `from step ${found.from_step} on: ${found.changes.map(({ key, before, after }) => `${key} ${before} → ${after}`).join(', ')}` : 'nothing changes';
  if (name === 'save') return `after step ${found.step}: ${found.checkpoint}`;
  if (name === 'profile') return `step ${found.profiled_step}: ${found.files.join(', ') || 'no profile'}${Object.entries(found.failed).map(([who, why]) => `; ${who}: ${why}`).join('')}`;
  if (name === 'stop') return `after step ${found.step}: it finishes its step, saves and ends with exit code ${found.exit_code}`;
  const numbers = Object.entries(found.evaluation || {}).filter(([, value]) => typeof value === 'number').map(([key, value]) => `${key} ${figure(value)}`);
  return found.evaluation ? `after step ${found.step}: ${numbers.join(', ')}` : 'the run was asked to stop during the evaluation';
}

// What a run says of a command that it refuses.
function refusalFields({ path, value, rule, repair }) {
  const rows = Object.entries({ path, value: value === undefined ? null : JSON.stringify(value), rule, repair }).filter(([, text]) => text !== null && text !== undefined && text !== '');
  return rows.length ? make('dl', {}, ...rows.flatMap(([name, text]) => [make('dt', { text: name }), make('dd', { text: String(text) })])) : null;
}

VIEWS.control = { at: 60, label: 'Control', make: (run) => new ControlView(run), isThere: ({ canControl }) => canControl };

// The configuration of a run, key by key, beside what its presets give or that of another run.

class ConfigurationView {
  constructor(run, runs, place) {
    Object.assign(this, { run, against: place.query.get('against') || '', onlyDifferent: place.query.get('diff') === '1', query: '', asText: false });
    this.choice = make('input', { type: 'search', value: this.against, placeholder: 'its presets', list: 'runs', 'aria-label': 'Compare with run' });
    this.choice.addEventListener('change', () => this.compare(this.choice.value));
    this.names = make('datalist', { id: 'runs' }, ...runs.filter((id) => id !== run).map((id) => make('option', { value: id })));
    this.filter = make('input', { type: 'search', placeholder: 'Filter keys and values  ( / )', 'aria-label': 'Filter keys' });
    this.filter.addEventListener('input', () => { this.query = this.filter.value.toLowerCase(); this.render(); });
    this.only = make('input', { type: 'checkbox', checked: this.onlyDifferent });
    this.only.addEventListener('change', () => { this.onlyDifferent = this.only.checked; keep({ diff: this.only.checked ? '1' : '' }); this.render(); });
    this.text = make('button', { type: 'button', class: 'switch', 'aria-pressed': 'false', text: 'YAML', on: { click: () => { this.asText = !this.asText; this.text.setAttribute('aria-pressed', String(this.asText)); this.render(); } } });
    this.body = make('div', { class: 'card settings', 'data-test': 'settings' });
    this.note = make('p', { class: 'help' });
    this.node = make(
      'div', {},
      make('div', { class: 'listbar' }, make('label', {}, 'Compared with ', this.choice), this.names, make('label', { class: 'check' }, this.only, 'only what differs'), this.filter, this.text),
      this.note, this.body,
    );
    this.keys = { '/': () => this.filter.focus() };
    this.load();
  }

  compare(id) {
    this.against = id.trim();
    keep({ against: this.against });
    this.load();
  }

  async load() {
    try {
      this.found = await ask('config', { run: this.run, against: this.against || null });
    } catch (error) {
      this.note.textContent = error.message;
      return;
    }
    this.render();
  }

  render() {
    const { rows, base, note, text } = this.found;
    const differs = ([, mine, theirs]) => base !== '' && mine !== theirs;
    const shown = rows.filter((row) => (!this.onlyDifferent || differs(row)) && row.join(' ').toLowerCase().includes(this.query));
    const count = rows.filter(differs).length;
    this.note.textContent = note || (base ? `${count.toLocaleString('en-US')} of ${rows.length.toLocaleString('en-US')} keys differ from ${this.against || base}.` : '');
    if (this.asText || (!rows.length && text)) {
      this.body.replaceChildren(make('pre', { text }));
      return;
    }
    const sections = new Map();
    shown.forEach((row) => {
      const [section] = row[0].split('.');
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push(row);
    });
    this.body.replaceChildren(...[...sections].map(([name, found]) => make('section', {}, make('h3', { text: name }), make('dl', {}, ...found.flatMap((row) => this.row(row, differs(row)))))));
    if (!shown.length) this.body.replaceChildren(make('p', { class: 'help', text: 'Nothing is like that.' }));
  }

  row([key, mine, theirs], isOther) {
    const value = make('span', { class: 'mine', text: mine ?? 'not set' });
    const other = isOther ? make('span', { class: 'theirs', title: this.against || this.found.base, text: theirs ?? 'not set' }) : null;
    return [make('dt', { class: isOther ? 'other' : '', text: key }), make('dd', { class: isOther ? 'other' : '' }, value, other ? ' ' : null, other)];
  }
}

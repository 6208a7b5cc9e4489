// Runs the program of a report without a browser: a document of plain objects, printed as an outline in JSON.
//   node page_outline.js PAGE.html [SCRIPT]
// SCRIPT is run afterwards, with `find(test)`, which returns the elements that a function accepts.

const fs = require('fs');

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, childNodes: [], style: {}, dataset: {}, listeners: {} });
  }

  get firstChild() { return this.childNodes[0]; }
  get childElementCount() { return this.childNodes.length; }
  get clientWidth() { return 600; }
  get textContent() { return this.childNodes.map((child) => (child instanceof Element ? child.textContent : child)).join(''); }
  set textContent(text) { this.childNodes = [String(text)]; }
  get value() { return this.chosen ?? this.attributes.value ?? ''; }
  set value(value) { this.chosen = String(value); }

  append(...nodes) { this.childNodes.push(...nodes.map((node) => (node instanceof Element ? node : String(node)))); }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  addEventListener(name, handler) { (this.listeners[name] ||= []).push(handler); }
  fire(name) { (this.listeners[name] || []).forEach((handler) => handler({ target: this, preventDefault() {} })); }
  querySelectorAll() { return []; }
}

const all = (node) => [node, ...node.childNodes.filter((child) => child instanceof Element).flatMap(all)];
const page = fs.readFileSync(process.argv[2], 'utf-8');
const inside = (start) => { const from = page.indexOf(start) + start.length; return page.slice(from, page.indexOf('</script>', from)); };
const data = new Element('script');
data.textContent = inside('<script type="application/json" id="data">');
const report = new Element('div');

const document = {
  documentElement: new Element('html'),
  body: new Element('body'),
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  getElementById: (id) => ({ data, report })[id],
  addEventListener() {},
};
const globals = { document, Element, ResizeObserver: class { observe() {} }, matchMedia: () => ({ matches: false }) };
new Function(...Object.keys(globals), inside('\n<script>'))(...Object.values(globals));

const find = (test) => all(report).filter(test);
if (process.argv[3]) new Function('find', process.argv[3])(find);
const classes = (node) => (node.attributes.class || '').split(' ');
const outline = (node) => ({ tag: node.tag, class: classes(node), text: node.textContent, children: node.childNodes.filter((child) => child instanceof Element).map(outline) });
process.stdout.write(JSON.stringify(outline(report)));

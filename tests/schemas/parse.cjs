// Parses AsyncAPI documents: the folder of the parser, then files; writes the diagnostics of each as JSON.
const { readFileSync } = require("node:fs");
const [folder, ...files] = process.argv.slice(2);
const { Parser } = require(`${folder}/@asyncapi/parser`);

async function diagnose(file) {
  const { diagnostics } = await new Parser().parse(readFileSync(file, "utf8"));
  return diagnostics.map(({ path, message, severity }) => ({ path, message, severity }));
}

Promise.all(files.map(diagnose)).then((all) => process.stdout.write(JSON.stringify(all)));
